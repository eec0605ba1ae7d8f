"""Weights as files: ranges of layers, exports, checkpoints."""
