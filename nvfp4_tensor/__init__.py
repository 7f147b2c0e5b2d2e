from nvfp4_tensor import ops
