"""Pure choice of a replica."""
