"""Pools, replicas and their launchers."""
