"""Measurements, run as ``python -m benchmarks.NAME [--json]``."""
