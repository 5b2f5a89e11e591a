"""Loads the runtime's OpenMP setting before any test module imports torch, as the engine itself does."""

import dataplane.runtime  # noqa: F401 - for its effect
