"""How good Retry-After is: replays in which whoever is refused waits exactly so long and comes back."""
