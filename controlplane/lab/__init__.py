"""Workloads, benches and, later, the simulator: what measures the control plane from outside."""
