"""Hardware: what device this is and what it holds."""
