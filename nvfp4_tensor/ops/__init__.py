"""The operators torch.ops.nvfp4.*, and the libraries that make them fast."""
