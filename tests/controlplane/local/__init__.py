"""Running everything on one machine."""
