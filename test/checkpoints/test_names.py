"""Patterns, groups and unusual names of parameters."""

import itertools

import pytest
import torch
from helpers.checkpoint_folders import write_dense

from nvfp4_tensor import checkpoints
from nvfp4_tensor.checkpoints import tensor_of
from nvfp4_tensor.quantization.model_families import LEFT_DENSE, NOT_LINEAR
from nvfp4_tensor.quantization.names import is_matched, joined_with, natural, some


def test_joined():
    modules = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj",
               "mlp.down_proj", "mlp.experts.3.w1", "mlp.experts.3.w3", "mlp.experts.4.w1"]  # fmt: skip
    names = {f"model.layers.{i}.{module}.weight" for i in (1, 2) for module in modules}
    for group in (modules[:3], modules[3:5], modules[5:6], modules[6:8]):
        expected = tuple(f"model.layers.1.{module}.weight" for module in group)
        assert all(joined_with(name, names) == expected for name in expected)
    assert joined_with("q_proj.weight", {"q_proj.weight", "v_proj.weight"}) == ("q_proj.weight", "v_proj.weight")
    assert joined_with("q_proj.bias", {"q_proj.bias", "v_proj.bias"}) == ("q_proj.bias",)


def test_patterns():
    for pattern, yes, no in [
        ("lm_head", "lm_head.weight", "model.lm_head.weight"),
        ("*.down_proj", "a.down_proj.weight", "a.up_proj.weight"),
        ("re:.*down", "a.down_proj.weight", "a.up_proj.weight"),
        ("a.x", "a.x.weight", "a.xy.weight"),
        ("experts.gate_up_proj", "experts.gate_up_proj", "experts.down_proj"),
    ]:
        assert is_matched(yes, [pattern]) and not is_matched(no, [pattern]), pattern
    with pytest.raises(ValueError, match=r"'re:\(' is not a regular expression"):
        is_matched("a.weight", ["re:("])


LINEARS = [
    "model.layers.0.mlp.gate_proj.weight",
    "model.layers.0.self_attn.o_proj.weight",
    "h.3.mlp.dense_4h_to_h.weight",
]
OTHERS = [
    "model.embed_tokens.weight", "transformer.wte.weight", "model.layers.0.input_layernorm.weight", "lm_head.weight",
    "model.layers.0.mlp.gate.weight", "model.layers.0.block_sparse_moe.gate.weight",
    "model.visual.blocks.0.attn.qkv.weight",
]  # fmt: skip


def test_defaults():
    patterns = (*NOT_LINEAR, *(pattern for each in LEFT_DENSE.values() for pattern in each))
    assert not any(is_matched(name, patterns) for name in LINEARS)
    assert all(is_matched(name, patterns) for name in OTHERS)


def test_order_and_lists():
    assert sorted(["l.10.b", "l.2.b", "l.2.a"], key=natural) == ["l.2.a", "l.2.b", "l.10.b"]
    assert some(["a", "b"]) == "a, b" and some(list("abcdef")) == "a, b, c, d and 2 more"


STRANGE = [
    "weight", "a..weight", ".weight", "\u00e4 b.weight", "a/b.weight", "../../x.weight", "x" * 300 + ".weight",
    "1.weight", "a.weight.weight", "[a].weight", "*.weight", "logit_scale", "norm.shape", "a.weight_packed",
    "a.weight_scale", "b.biases", "c.scales", "d._weight_qdata", "e.comfy_quant", "a.weight_zero_point",
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "to"), [*zip(STRANGE, itertools.cycle(["modelopt", "compressed-tensors", "torchao", "mlx", "comfy"]))]
)
def test_strange_names_are_read_again_or_raise_an_error(tmp_path, name, to):
    tensors = {name: torch.randn(32, 64).bfloat16(), "z.weight": torch.randn(16, 64).bfloat16()}
    write_dense(tmp_path / "src", tensors)
    dst = tmp_path / ("d.safetensors" if to == "comfy" else "d")
    try:
        checkpoints.quantize(tmp_path / "src", dst, to=to, progress=False)
    except ValueError as error:
        assert name in str(error)
        assert [each.name for each in tmp_path.iterdir()] == ["src"]
        return
    with checkpoints.read(dst) as checkpoint:
        assert set(checkpoint.entries) == set(tensors) and checkpoint.entries["z.weight"].quantized
        for each, entry in checkpoint.entries.items():
            value = tensor_of(checkpoint.linear(each)).dequantize() if entry.quantized else checkpoint.dense(each)
            assert (value.float() - tensors[each].float()).norm() < 0.2 * tensors[each].float().norm()
