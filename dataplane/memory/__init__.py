"""State and memory: KV blocks, who holds them, which can be shared. Torch-free but for `kv_store`."""
