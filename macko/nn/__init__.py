"""Layers and models: SparseLinear, and what converts, merges and fuses the layers of a model."""
