"""Policy as a whole: its epoch on every gateway and replica, and its history with a way back. Layer: service."""
