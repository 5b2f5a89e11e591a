"""Tidegate's engine: paged KV, continuous batching, and the replica that serves it."""
