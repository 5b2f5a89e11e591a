"""Control-plane tests, one folder a domain."""
