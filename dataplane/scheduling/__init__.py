"""Scheduling: who runs this step, with how many tokens. Pure: no I/O, no clock, no torch."""
