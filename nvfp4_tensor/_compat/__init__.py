"""What other libraries and earlier files need: torchao's import, names that pickles hold, caller frames."""
