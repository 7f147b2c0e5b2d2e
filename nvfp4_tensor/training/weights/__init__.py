"""Weights that are stored in NVFP4: an optimizer without master copies, write-back, refitting, merging adapters."""
