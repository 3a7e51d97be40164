"""Pruning: which weights become zero, and what the others become in turn."""
