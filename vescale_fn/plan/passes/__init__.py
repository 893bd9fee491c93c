"""Passes: each improves a plan in one way. Their order is in `pipeline.py`, one folder up."""
