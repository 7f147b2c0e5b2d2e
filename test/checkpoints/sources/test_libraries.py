"""What GPTQModel, AutoAWQ, bitsandbytes, compressed-tensors and torchao write is decoded as they do, in pieces."""

import pytest
import torch
from helpers.checkpoint_folders import GOLDEN
from helpers.coded_folders import write_coded
from safetensors.torch import load_file
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import (
    Float8Tensor,
    Int4Tensor,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerAxis,
    PerGroup,
    PerRow,
    PerTensor,
    quantize_,
)

from nvfp4_tensor.checkpoints.sources import coded
from nvfp4_tensor.checkpoints.sources.reading import open_source

ROWS, COLUMNS = 200, 96


@pytest.fixture(autouse=True)
def small_strips(monkeypatch):
    """More than one strip, of which the last one is not full, in threads of their own."""
    before = torch.get_num_threads()
    monkeypatch.setattr(coded, "STRIP", 128 * COLUMNS)
    torch.set_num_threads(3)
    yield
    assert torch.get_num_threads() == 3
    torch.set_num_threads(before)


def assert_decodes(folder, decoded, *others):
    with open_source(folder) as source:
        source.check_values()
        assert source.entries.keys() == {"m.weight", *others} and source.entries["m.weight"].shape == decoded.shape
        assert torch.equal(source.dense("m.weight"), decoded)
        return source.coded_weights["m.weight"].kind


WRITTEN = load_file(GOLDEN / "other_quantizations.safetensors")
"""By GPTQModel, AutoAWQ and bitsandbytes, with what they decode; see make_other_quantizations.py."""
SETTINGS = {
    "gptq": {"quant_method": "gptq", "bits": 4},
    "gptq_v2": {"quant_method": "gptq", "checkpoint_format": "gptq_v2"},
    "gptq_8": {"quant_method": "gptq", "checkpoint_format": "gptq"},
    "awq": {"quant_method": "awq", "version": "gemm"},
    **{layout: {"quant_method": "bitsandbytes"} for layout in ("nf4", "nf4_nested", "fp4", "int8")},
}


@pytest.mark.parametrize("layout", SETTINGS)
def test_as_their_writers_decode(tmp_path, layout):
    tensors = {name.removeprefix(f"{layout}."): t for name, t in WRITTEN.items() if name.startswith(f"{layout}.")}
    decoded = tensors.pop("decoded")
    dtype = str(decoded.dtype).removeprefix("torch.")
    assert_decodes(write_coded(tmp_path / "a", tensors, SETTINGS[layout], dtype=dtype), decoded)


def weight_arguments(bits=8, strategy="channel", **others):
    return {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": True, **others}


COMPRESSED = {
    "tensor": ("int-quantized", weight_arguments(strategy="tensor")),
    "channel": ("int-quantized", weight_arguments()),
    "asymmetric": ("naive-quantized", weight_arguments(symmetric=False)),
    "groups": ("pack-quantized", weight_arguments(4, "group", group_size=32)),
    "asymmetric groups": ("pack-quantized", weight_arguments(4, "group", group_size=32, symmetric=False)),
    "3 bits": ("pack-quantized", weight_arguments(3, symmetric=False)),
    "8 bits": ("pack-quantized", weight_arguments(8, "group", group_size=16)),
}


def compressed(format, arguments):
    """A weight as compressed-tensors writes it, the group of its module, and what it decodes to."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments))
    weight = random_weight()
    groups = {"tensor": (1, -1), "channel": (ROWS, 1, -1)}.get(
        arguments["strategy"], (ROWS, -1, arguments.get("group_size", 1))
    )
    blocks = weight.reshape(groups)
    scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    compressor = BaseCompressor.get_value_from_registry(format)
    state = compressor.compress(state, scheme)
    return state, compressor.decompress(state, scheme)["weight"]


@pytest.mark.parametrize(("name", "reordered"), [*((name, False) for name in COMPRESSED), ("asymmetric groups", True)])
def test_compressed_tensors(tmp_path, name, reordered):
    """Also as earlier releases stored activation order: weight_g_idx has the group of each column."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

    format, arguments = COMPRESSED[name]
    state, decoded = compressed(format, arguments)
    if reordered:
        order = torch.randperm(COLUMNS)  # column i of the file is column order[i] of the groups
        codes = unpack_from_int32(state["weight_packed"], 4, torch.Size((ROWS, COLUMNS)))
        state |= {"weight_packed": pack_to_int32(codes[:, order], 4), "weight_g_idx": (order // 32).int()}
        decoded = decoded[:, order]
    groups = {
        "group_0": {"targets": ["re:.*other"], "weights": weight_arguments(8, "tensor")},
        "group_1": {"targets": ["Linear"], "weights": arguments},
    }
    settings = {"quant_method": "compressed-tensors", "format": format, "config_groups": groups}
    folder = write_coded(tmp_path / "a", {f"m.{key}": value for key, value in state.items()}, settings)
    assert assert_decodes(folder, decoded) == f"compressed-tensors int{arguments['num_bits']}"


def int4():
    """Laid out by torchao's description: codes -8 to 7, two a byte, the first one low."""
    codes = torch.randint(-8, 8, (ROWS, COLUMNS), dtype=torch.int8)
    scale, zero = torch.rand(3, ROWS).bfloat16(), torch.randn(3, ROWS).bfloat16()
    packed = (codes[:, ::2] & 15) | codes[:, 1::2] << 4
    decoded = codes.float() * scale.float().t().repeat_interleave(32, 1) + zero.float().t().repeat_interleave(32, 1)
    return Int4Tensor(packed, scale, zero, [1, 32], torch.Size((ROWS, COLUMNS))), decoded.bfloat16()


def random_weight():
    return torch.randn(ROWS, COLUMNS).bfloat16()


def of_tensor(t):
    return t, t.dequantize()


def quantized(config):
    linear = torch.nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.bfloat16)
    quantize_(linear, config)
    return of_tensor(linear.weight.data)


def mx(elements, swizzled):
    return of_tensor(MXTensor.to_mx(random_weight(), elements, 32, is_swizzled_scales=swizzled))


TORCHAO = {
    "int4": int4,
    "int8": lambda: quantized(Int8WeightOnlyConfig(version=2)),
    "int8 per tensor": lambda: quantized(Int8WeightOnlyConfig(version=2, granularity=PerTensor())),
    "int8 activations": lambda: quantized(Int8DynamicActivationInt8WeightConfig(version=2)),
    "int4 in int8": lambda: quantized(IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))),
    "int8 by row": lambda: quantized(IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0))),
    "float8 by row": lambda: of_tensor(Float8Tensor.from_hp(random_weight(), granularity=PerRow())),
    "float8": lambda: of_tensor(Float8Tensor.from_hp(random_weight(), granularity=PerTensor())),
    "mxfp8": lambda: mx(torch.float8_e4m3fn, False),
    "mxfp8 swizzled": lambda: mx(torch.float8_e4m3fn, True),
    "mxfp4": lambda: mx(torch.float4_e2m1fn_x2, False),
}


@pytest.mark.parametrize("name", TORCHAO)
@pytest.mark.parametrize("configured", [False, True])
def test_torchao(tmp_path, name, configured):
    weight, decoded = TORCHAO[name]()
    tensors, metadata = flatten_tensor_state_dict({"m.weight": weight, "norm.weight": torch.ones(8)})
    settings = {"quant_method": "torchao"} if configured else None
    assert_decodes(write_coded(tmp_path / "a", tensors, settings, metadata), decoded, "norm.weight")
