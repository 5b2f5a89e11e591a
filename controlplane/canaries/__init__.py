"""Canaries: each limit × endpoint is proven on a schedule by a tenant of its own."""
