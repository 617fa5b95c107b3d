"""Turns measured records into a plan: the sweet spot and the hours."""
