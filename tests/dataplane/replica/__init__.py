"""Tests of the replica's front, core process and reports."""
