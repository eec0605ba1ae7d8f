"""Optimisers: which weights decay, and how the learning rate moves."""
