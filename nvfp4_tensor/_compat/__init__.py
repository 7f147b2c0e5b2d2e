"""Compatibility with other libraries and earlier files: torchao's import, names in pickles, caller frames."""
