"""Model algorithm: from logits to tokens, and when to stop."""
