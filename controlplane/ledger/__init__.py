"""Usage stream → Postgres."""
