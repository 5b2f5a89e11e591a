"""Model algorithm: checkpoints and the networks they hold."""
