"""Launchers start replicas: on this machine, on Kubernetes, on Ray. One file each, one protocol (`base`)."""
