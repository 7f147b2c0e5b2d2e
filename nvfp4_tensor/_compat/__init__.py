"""Compatibility with other libraries: torchao's import, names in pickles, caller frames."""
