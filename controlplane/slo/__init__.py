"""What tenants are promised: objectives on latency and availability."""
