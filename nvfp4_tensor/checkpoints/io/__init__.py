"""Files: safetensors, folders, sidecars, and writes that can be resumed."""
