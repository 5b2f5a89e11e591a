"""What is let in, when, and what is turned away."""
