"""State dicts in plain tensors: exact round trips, with safetensors too."""

import pytest
import torch
from helpers.checkpoint_folders import GOLDEN
from safetensors.torch import load_file, save_file

from nvfp4_tensor import NVFP4Tensor, ProductBackend, QuantizeSpec, checkpoints, quantize, quantize_experts
from nvfp4_tensor.checkpoints import from_plain, tensor_of, to_plain

SIGNED = QuantizeSpec(hadamard_sign=0x1234)
STOCHASTIC = QuantizeSpec(
    round_mode="stochastic", random_bits=8, hardware_rounding=True, block_rows=16, scale_ceiling=256
)
WEIGHTS = {
    "plain": lambda: quantize(torch.randn(32, 64).bfloat16()),
    "columns": lambda: quantize(torch.randn(5, 40)),
    "spec": lambda: quantize(torch.randn(32, 64).half(), QuantizeSpec(round_mode="away", scale_search=True)),
    "four_over_six": lambda: quantize(torch.randn(32, 64), QuantizeSpec(four_over_six="mae", scale_rounding="up")),
    "stochastic": lambda: quantize(torch.randn(32, 64), STOCHASTIC),
    "transposed": lambda: quantize(torch.randn(32, 64)).t(),
    "experts": lambda: quantize_experts(torch.randn(3, 32, 64)),
    "rows": lambda: torch.cat([quantize(torch.randn(16, 64)), quantize(torch.randn(16, 64) * 7)]),
    "w4a4": lambda: quantize(torch.randn(32, 64), SIGNED)._replace(
        activation_spec=SIGNED, activation_amax=torch.tensor(0.1), product_backend=ProductBackend.SCALED_MM
    ),
    "fp8": lambda: quantize(torch.randn(32, 64))._replace(product_backend=ProductBackend.FP8),
}  # fmt: skip


def _bits(tensor):
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("kind", WEIGHTS)
def test_round_trip_through_a_file(tmp_path, kind):
    weight = WEIGHTS[kind]()
    state = {"a.weight": weight, "a.bias": torch.randn(3)}
    plain = to_plain(state)
    assert not any(isinstance(value, NVFP4Tensor) for value in plain.values())
    assert plain["a.weight"].data_ptr() == weight.qdata.data_ptr()  # codes are shared
    save_file({name: tensor.contiguous() for name, tensor in plain.items()}, tmp_path / "x.safetensors")
    again = from_plain(load_file(tmp_path / "x.safetensors"))
    assert set(again) == set(state) and torch.equal(again["a.bias"], state["a.bias"])
    for name, value in weight._fields().items():
        got = getattr(again["a.weight"], name)
        if isinstance(value, torch.Tensor):
            assert got.shape == value.shape and torch.equal(_bits(got), _bits(value)), name
        else:
            assert got == value, name


def test_names_and_bytes_are_modelopts():
    plain = to_plain({"experts.down_proj": WEIGHTS["experts"](), "weight": WEIGHTS["plain"]()})
    assert set(plain) == {
        "experts.down_proj", "experts.down_proj_weight_scale", "experts.down_proj_weight_scale_2",
        "experts.down_proj_weight_settings", "weight", "weight_scale", "weight_scale_2", "weight_settings",
    }  # fmt: skip
    state = from_plain(load_file(GOLDEN / "modelopt_nvfp4/model.safetensors"))
    with checkpoints.read(GOLDEN / "modelopt_nvfp4") as read:
        assert set(state) == set(read.entries)
        weight, expected = state["model.layers.0.mlp.up_proj.weight"], read.linear("model.layers.0.mlp.up_proj.weight")
    assert weight.describe() == tensor_of(expected).describe()
    assert torch.equal(weight.dequantize(), tensor_of(expected).dequantize())


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda p: p.pop("a.weight_scale_2"), "weight_scale_2"),
        (lambda p: p.pop("a.weight_scale"), "a.weight_scale missing"),
        (lambda p: p["a.weight_scale_2"].neg_(), "a negative per-tensor scale"),
        (lambda p: p.update({"a.weight_scale": p["a.weight_scale"][:3]}), r"found \(3, 4\)"),
        (lambda p: p.update({"a.weight_settings": torch.zeros(3, dtype=torch.uint8)}), "Expecting value"),
        (lambda p: p.update({"a.weight_settings": torch.tensor([*b"[1]"], dtype=torch.uint8)}), r"settings \[1\]"),
        (lambda p: p.update({"a.weight": p["a.weight"].float()}), "uint8"),
    ],
)
def test_parts_that_do_not_fit_are_named(change, found):
    plain = to_plain({"a.weight": WEIGHTS["plain"]()})
    change(plain)
    with pytest.raises(ValueError, match=rf"a\.weight: not an NVFP4 weight: .*{found}"):
        from_plain(plain)
