"""The parts of `tidegate bench scheduler`: one policy each, over the real scheduler and a simulated machine."""
