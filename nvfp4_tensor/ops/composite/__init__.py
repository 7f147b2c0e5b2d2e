"""The ops in plain torch. Their signatures are the schemas, and devices without a native kernel run them."""

from nvfp4_tensor.ops.composite import (  # noqa: F401  define the ops
    attention,
    decode_layers,
    decode_step,
    optimizer,
    products,
    quantization,
    step,
    training,
)
