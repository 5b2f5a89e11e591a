"""What tenants may use, how it is counted, and what it costs."""
