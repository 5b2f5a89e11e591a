"""The table of endpoints below /v1: what a gateway serves, and canaries probe. Layer: service. Pure."""

from __future__ import annotations

INFERENCE = ("/chat/completions", "/completions")
"""What is leased and metered."""
MODELS = "/models"
