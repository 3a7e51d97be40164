"""Measuring: speed, memory and quality of a model and of what it is compared with."""
