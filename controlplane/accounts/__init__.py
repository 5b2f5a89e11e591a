"""Operators: login, sessions, tokens, roles."""
