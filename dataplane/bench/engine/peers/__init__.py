"""The engines that ours is measured beside: how each is installed, given the same weights, and started."""
