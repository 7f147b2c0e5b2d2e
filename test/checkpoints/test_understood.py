"""Folders with something that a reader does not understand: refused by name, before a byte is written."""

import hashlib
import itertools
import random

import pytest
import torch
from helpers.checkpoint_folders import edit, edit_json
from safetensors.torch import save_file

from nvfp4_tensor import checkpoints
from nvfp4_tensor.checkpoints import Entry, inspection
from nvfp4_tensor.checkpoints.understood import check_understood

FORMATS = ("modelopt", "compressed-tensors", "torchao", "mlx", "comfy", "dense")
RESCALING = (
    "weight_scale_inv", "pre_quant_scale", "weight_g_idx", "weight_zero_point", "input_zero_point", "output_scale",
    "svdquant_lora_a", "smooth_factor", "scale_inv", "qzeros", "g_idx", "SCB", "weight.absmax",
)  # fmt: skip
Q = "model.layers.0.self_attn.q_proj"


def contents(folder):
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def calls(path, out):
    """What reads a checkpoint: all must say the same."""
    yield lambda: checkpoints.read(path)
    yield lambda: inspection.inspect(path, progress=False)
    yield lambda: checkpoints.convert(path, out, to="modelopt", progress=False)
    yield lambda: checkpoints.quantize(path, out, progress=False)
    yield lambda: checkpoints.load(torch.nn.Linear(16, 16), path, progress=False)


def assert_refused(path, out, message):
    before = contents(path.parent if path.is_file() else path)
    for call in calls(path, out):
        with pytest.raises(ValueError, match=message):
            call()
        assert not list(out.parent.glob(f"{out.name}*"))
    assert contents(path.parent if path.is_file() else path) == before


EXTRA = "mlp.experts.extra.weight"
FOREIGN = [
    *((format, f"{Q}.{suffix}", torch.full((64,), 4.0)) for format, suffix in zip(itertools.cycle(FORMATS), RESCALING)),
    *((format, f"{Q}.{''.join(random.Random(format).choices('abcdefghijklm_', k=9))}", torch.ones(1))
      for format in FORMATS[:-1]),
    *(("dense", EXTRA, torch.ones(32, 32).to(dtype)) for dtype in (torch.float8_e5m2, torch.int8, torch.uint8)),
    *((format, EXTRA, torch.ones(32, 32).to(dtype)) for format, dtype in (
        ("compressed-tensors", torch.int8), ("torchao", torch.float8_e4m3fn), ("comfy", torch.int32))),
]  # fmt: skip
"""Tensors that rescale a weight, unknown ones beside codes (a linear has a weight and a bias), and weights in codes."""


@pytest.mark.parametrize(("format", "name", "tensor"), FOREIGN)
def test_tensors_of_another_quantization(copy, tmp_path, format, name, tensor):
    folder, path = copy(format)
    edit(folder, lambda tensors: tensors.update({name: tensor}))
    named = rf"{name.rpartition('.')[2]}|extra\.weight"
    assert_refused(path, tmp_path / "out", rf"{named}|already quantized|NVFP4|quantized by")
    with pytest.raises(ValueError, match=rf"{name} (change the meaning|\(\w+\) are weights of another)"):
        checkpoints.read(path)


@pytest.mark.parametrize(("name", "said"), [("weight", r" \(int8\) are weights"), ("bias", ": expected a floating-")])
def test_a_parameter_in_integers(tmp_path, name, said):
    """A model that was refused a tensor is unchanged."""
    save_file({name: torch.ones(64, dtype=torch.int8)}, tmp_path / "model.safetensors")
    model = torch.nn.LayerNorm(64)
    before = model.get_parameter(name).clone()
    with pytest.raises(ValueError, match=rf"{name}{said}"):
        checkpoints.load(model, tmp_path, strict=False, progress=False)
    assert torch.equal(model.get_parameter(name), before)


def entry(*shape, dtype=torch.bfloat16, quantized=False):
    return Entry(shape=shape, dtype=dtype, quantized=quantized)


def test_what_models_have_is_no_quantization(tmp_path):
    """Scales of norms, masks, indices, and parameters of experts that are one tensor."""
    check_understood(
        {
            "logit_scale": entry(), "norm.weight": entry(64), "norm.scale": entry(64), "inner.input_scale": entry(3),
            "attn.bias": entry(1, 1, 64, 64, dtype=torch.uint8), "position_ids": entry(1, 64, dtype=torch.int64),
            "attn.mask": entry(8, 8, dtype=torch.uint8), "experts.gate_up_proj": entry(4, 64, 64, quantized=True),
            "experts.gate_up_proj_bias": entry(4, 64), "experts.down_proj": entry(4, 64, 64),
            "mlp.gate.weight": entry(4, 64),
            "mlp.gate.e_score_correction_bias": entry(4), "mlp.experts.down_proj_bias": entry(4, 64),
            "k_proj.weight": entry(64, 64, quantized=True), "k_proj.k_scale": entry(), "k_proj.bias": entry(64),
            "embed.embed_scale": entry(),
            "k_proj.lora_A.weight": entry(8, 64), "weight_norm.weight": entry(64, 64), "conv1d.weight": entry(64, 1, 4),
        },
        tmp_path,
    )  # fmt: skip
    for name in ("experts.gate_up_proj_scale_inv", "experts.gate_up_proj_foo", "experts.down_proj_scales"):
        entries = {"experts.gate_up_proj": entry(4, 64, 64, quantized=True), "experts.down_proj": entry(4, 64, 64)}
        with pytest.raises(ValueError, match=f"{name} change the meaning"):
            check_understood(entries | {name: entry(4)}, tmp_path)


def test_a_quantization_that_a_nested_configuration_describes(copy, tmp_path):
    folder, path = copy("dense")
    method = {"quantization_config": {"quant_method": "hqq"}}
    edit_json(folder / "config.json", lambda config: config.update(text_config=method))
    assert_refused(path, tmp_path / "out", "found one quantized by hqq")
