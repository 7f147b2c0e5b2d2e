"""One module or package for each checkpoint format."""
