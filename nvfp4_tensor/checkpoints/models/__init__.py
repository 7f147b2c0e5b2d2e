"""Checkpoints and models in memory: loading, saving, and how parameter names map."""
