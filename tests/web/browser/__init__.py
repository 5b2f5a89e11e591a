"""The console in a real Chromium, against the real control plane in a process of its own.

Tests here are plain functions: the browser's synchronous driver owns the thread's event loop while it lives.
"""
