"""Checkpoints of other quantizations, read as dense weights by ``checkpoints.quantize``."""
