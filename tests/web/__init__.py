"""The console, from numbers to a real browser."""
