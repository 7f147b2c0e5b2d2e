"""Files: safetensors, folders, sidecar files, and writes that can be resumed."""
