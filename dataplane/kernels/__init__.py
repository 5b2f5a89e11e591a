"""Kernels: the operations a decoder is written with, and what computes them on a device."""
