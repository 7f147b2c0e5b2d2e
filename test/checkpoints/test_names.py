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
    """Groups of a module: test_model_families; here its layer and its expert, and parameters without a prefix."""
    names = {f"layers.{i}.mlp.experts.{e}.{w}.weight" for i in (1, 2) for e in (3, 4) for w in ("w1", "w2", "w3")}
    expected = ("layers.1.mlp.experts.3.w1.weight", "layers.1.mlp.experts.3.w3.weight")
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


def test_defaults():
    patterns = (*NOT_LINEAR, *(pattern for each in LEFT_DENSE.values() for pattern in each))
    for name in ("layers.0.mlp.gate_proj", "layers.0.self_attn.o_proj", "h.3.mlp.dense_4h_to_h",
                 "blocks.0.attention.output", "blocks.0.norm_attn_norm.attn.Wqkv",
                 "roberta_prelayernorm.layer.0.key"):  # fmt: skip
        assert not is_matched(f"{name}.weight", patterns), name
    for name in ("model.embed_tokens", "transformer.wte", "layers.0.input_layernorm", "lm_head", "layers.0.mlp.gate",
                 "layers.0.block_sparse_moe.gate", "model.visual.blocks.0.attn.qkv",
                 "head", "model.output", "cls.predictions.decoder", "blocks.0.norm1.linear",
                 "mtp.layers.0.up_proj"):  # fmt: skip
        assert is_matched(f"{name}.weight", patterns), name


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
