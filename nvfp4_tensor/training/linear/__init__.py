"""One linear that trains in NVFP4: its operands, its forward and backward, and the module."""
