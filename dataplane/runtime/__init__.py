"""Kernel and runtime: one planned step on one rank."""
