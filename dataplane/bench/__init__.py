"""Measurements with their cases and controls; they print, and never pass or fail on a time."""
