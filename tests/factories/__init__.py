"""Makers of rows, requests and tiny models."""
