"""Packed weights: a class a format, what their bytes mean, how they are cut and joined."""
