"""Operators, sessions and admin tokens."""
