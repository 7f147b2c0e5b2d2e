"""Matrix products with NVFP4 operands and the choice of their backend."""
