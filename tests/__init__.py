"""Tests of the whole project; the folders mirror the source."""
