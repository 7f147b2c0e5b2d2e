"""Weights that live in NVFP4: an optimizer without master copies, write-back, refitting, merged adapters."""
