"""The ops in plain torch. Their signatures are the schemas, and devices without a native kernel run them."""

from nvfp4_tensor.ops.composite.attention import append_codes, attend_codes, decode_heads
from nvfp4_tensor.ops.composite.decode_layers import decode_layers, decode_layers_plan
from nvfp4_tensor.ops.composite.decode_step import decode_step
from nvfp4_tensor.ops.composite.fp8 import fp8_matmul, fp8_operands
from nvfp4_tensor.ops.composite.generation import linear_row
from nvfp4_tensor.ops.composite.optimizer import adamw_step, adamw_step_codes, adamw_step_vector
from nvfp4_tensor.ops.composite.products import grouped_fp4_matmul, grouped_linear, grouped_matmul, matmul
from nvfp4_tensor.ops.composite.quantization import (
    amax,
    amax_pair,
    amax_pair_by_spec,
    amax_rotated,
    columns_of_values,
    dequantize,
    draw_rng_state,
    fake_quantize,
    hadamard,
    own_amax,
    own_amax_pair,
    quantize,
    quantize_activation,
    quantize_pair,
    quantize_pair_values,
    quantize_rows,
    rotate,
    rotate_back,
    transpose_codes,
)
from nvfp4_tensor.ops.composite.step import Activation, attend_one, gated, linears, norm_linears, place_one, rms_norm
from nvfp4_tensor.ops.composite.training import train_linear, train_linear_backward, train_linear_forward

__all__ = [
    "Activation",
    "adamw_step",
    "adamw_step_codes",
    "adamw_step_vector",
    "amax",
    "amax_pair",
    "amax_pair_by_spec",
    "amax_rotated",
    "append_codes",
    "attend_codes",
    "attend_one",
    "columns_of_values",
    "decode_heads",
    "decode_layers",
    "decode_layers_plan",
    "decode_step",
    "dequantize",
    "draw_rng_state",
    "fake_quantize",
    "fp8_matmul",
    "fp8_operands",
    "gated",
    "grouped_fp4_matmul",
    "grouped_linear",
    "grouped_matmul",
    "hadamard",
    "linear_row",
    "linears",
    "matmul",
    "norm_linears",
    "own_amax",
    "own_amax_pair",
    "place_one",
    "quantize",
    "quantize_activation",
    "quantize_pair",
    "quantize_pair_values",
    "quantize_rows",
    "rms_norm",
    "rotate",
    "rotate_back",
    "train_linear",
    "train_linear_backward",
    "train_linear_forward",
    "transpose_codes",
]
