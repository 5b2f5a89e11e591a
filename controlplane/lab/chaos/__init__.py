"""Faults injected into a real deployment under load, and what must hold after each."""
