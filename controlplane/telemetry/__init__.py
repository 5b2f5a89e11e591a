"""Histograms, ingest, rows, rollups, Prometheus."""
