"""Write ``other_quantizations.safetensors``: weights as GPTQModel, AutoAWQ and bitsandbytes store and decode them.

The tests read it without these libraries. It was written with GPTQModel 7.7.0, AutoAWQ 0.2.9 and bitsandbytes 0.50.2.
``<layout>.m.*`` are a linear's tensors, ``<layout>.decoded`` what the library decodes them to.
"""

from pathlib import Path

import torch
from awq.modules.linear.gemm import WQLinear_GEMM
from awq.utils.packing_utils import dequantize_gemm
from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant, int8_vectorwise_quant
from bitsandbytes.nn import Params4bit
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.quantization import FORMAT, QuantizeConfig
from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module
from safetensors.torch import save_file

ROWS, COLUMNS, GROUP = 32, 64, 32


def affine(weight: torch.Tensor, group: int, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points (N, K / group), rounded to nearest. A row of positive numbers has zero points of 0."""
    blocks = weight.float().view(len(weight), -1, group)
    low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
    scale = ((high - low) / (2**bits - 1)).half().float()
    return scale, (-low / scale).round()


def of_gptq(weight: torch.Tensor, bits: int, format: FORMAT, desc_act: bool) -> dict[str, torch.Tensor]:
    linear = torch.nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.float16)
    linear.weight.data = weight
    packed = TorchLinear(
        bits=bits, group_size=GROUP, sym=False, desc_act=desc_act, in_features=COLUMNS, out_features=ROWS, bias=False
    )
    indices = torch.arange(COLUMNS) // GROUP
    if desc_act:
        indices = indices[torch.randperm(COLUMNS)]
    scale, zero = affine(weight[:, indices.argsort(stable=True)], GROUP, bits)
    packed.pack_original(linear, scale, zero, indices.int())
    packed.post_init()
    decoded = packed.dequantize_weight().t()
    if format == FORMAT.GPTQ:
        convert_gptq_v2_to_v1_format_module(packed, QuantizeConfig(bits=bits, group_size=GROUP, sym=False))
    tensors = {f"m.{name}": getattr(packed, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
    return {**tensors, "decoded": decoded}


def of_awq(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    linear = torch.nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.float16)
    linear.weight.data = weight
    scale, zero = affine(weight, GROUP, 4)
    packed = WQLinear_GEMM.from_linear(linear, 4, GROUP, scales=scale.t().contiguous(), zeros=zero.t().contiguous())
    decoded = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, 4, GROUP).t()
    return {**{f"m.{name}": getattr(packed, name) for name in ("qweight", "qzeros", "scales")}, "decoded": decoded}


def of_bitsandbytes(weight: torch.Tensor, kind: str, nested: bool) -> dict[str, torch.Tensor]:
    packed = Params4bit(weight, requires_grad=False, quant_type=kind, compress_statistics=nested)._quantize("cpu")
    state = packed.quant_state
    others = {f"m.weight.{name}": value for name, value in state.as_dict(packed=True).items()}
    return {"m.weight": packed.data, **others, "decoded": dequantize_4bit(packed.data, state)}


def of_bitsandbytes_int8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    codes, scale, _ = int8_vectorwise_quant(weight)
    others = {"m.SCB": scale, "m.weight_format": torch.tensor(0, dtype=torch.uint8)}
    return {"m.weight": codes, **others, "decoded": int8_vectorwise_dequant(codes, scale)}


torch.manual_seed(0)
weight = torch.randn(ROWS, COLUMNS).half()
weight[3] = weight[3].abs()
layouts = {
    "gptq": of_gptq(weight.clone(), 4, FORMAT.GPTQ, False),
    "gptq_v2": of_gptq(weight.clone(), 4, FORMAT.GPTQ_V2, True),
    "gptq_8": of_gptq(weight.clone(), 8, FORMAT.GPTQ, True),
    "awq": of_awq(weight.clone()),
    "nf4": of_bitsandbytes(weight.clone(), "nf4", False),
    "nf4_nested": of_bitsandbytes(weight.bfloat16(), "nf4", True),
    "fp4": of_bitsandbytes(weight.bfloat16(), "fp4", False),
    "int8": of_bitsandbytes_int8(weight.clone()),
}
named = {f"{layout}.{name}": t.detach().contiguous() for layout, of in layouts.items() for name, t in of.items()}
save_file(named, Path(__file__).with_name("other_quantizations.safetensors"))
