"""Tidegate's control plane: tenants, gateway, fleet, telemetry and console. It never imports torch."""
