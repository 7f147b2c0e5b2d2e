"""The ops in plain torch. Their signatures are the schemas, and devices without a native kernel run them."""

from nvfp4_tensor.ops.composite.generation import decode_llama, linear_row
from nvfp4_tensor.ops.composite.products import grouped_fp4_matmul, grouped_linear, grouped_matmul, matmul
from nvfp4_tensor.ops.composite.quantization import (
    amax,
    amax_pair,
    amax_rotated,
    columns_of_values,
    dequantize,
    draw_rng_state,
    fake_quantize,
    hadamard,
    own_amax,
    quantize,
    quantize_activation,
    quantize_pair,
    quantize_pair_values,
    quantize_rows,
    rotate,
    transpose_codes,
)

__all__ = [
    "amax",
    "amax_pair",
    "amax_rotated",
    "columns_of_values",
    "decode_llama",
    "dequantize",
    "draw_rng_state",
    "fake_quantize",
    "grouped_fp4_matmul",
    "grouped_linear",
    "grouped_matmul",
    "hadamard",
    "linear_row",
    "matmul",
    "own_amax",
    "quantize",
    "quantize_activation",
    "quantize_pair",
    "quantize_pair_values",
    "quantize_rows",
    "rotate",
    "transpose_codes",
]
