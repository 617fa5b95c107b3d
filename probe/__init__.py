"""Measures peak memory and throughput of the very step that trains."""
