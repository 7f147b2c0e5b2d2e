"""Quantizing a folder: bitwise equality with quantize(), shared scales, and what is left dense."""

import pytest
import torch
from helpers.checkpoint_folders import content, dense_tensors, edit_json, same_files, write_dense

from nvfp4_tensor import QuantizeSpec, checkpoints, quantize
from nvfp4_tensor.checkpoints import quantizing, tensor_of
from nvfp4_tensor.checkpoints.io import safetensors
from nvfp4_tensor.checkpoints.io.folder import FolderCheckpoint


@pytest.fixture
def quantized(tmp_path):
    """Quantizes the folder ``src``, made of the tensors if they are given; returns the weights that are quantized."""

    def call(tensors=None, dst="dst", **options):
        if tensors is not None or not (tmp_path / "src").exists():
            write_dense(tmp_path / "src", tensors)
        checkpoints.quantize(tmp_path / "src", tmp_path / dst, progress=False, **options)
        with checkpoints.read(tmp_path / dst) as read:
            return {name: read.linear(name) for name, entry in read.entries.items() if entry.quantized}

    return call


@pytest.mark.parametrize("spec", [QuantizeSpec(four_over_six=True), QuantizeSpec(block_rows=16)], ids=str)
def test_the_bits_of_quantize(quantized, tmp_path, spec):
    tensors = dense_tensors()
    found, name = quantized(tensors, spec=spec), "model.layers.1.mlp.down_proj.weight"
    assert found.keys() == {each for each in tensors if "_proj" in each}
    expected = quantize(tensors[name], spec)
    assert torch.equal(tensor_of(found[name]).dequantize(), expected.dequantize())
    assert torch.equal(found[name].qdata, expected.qdata)
    with checkpoints.read(tmp_path / "dst") as read:
        assert all(torch.equal(read.dense(other), tensors[other]) for other in tensors.keys() - found.keys())


@pytest.mark.smoke
def test_joined_linears_share_the_largest_amax(quantized):
    tensors = dense_tensors()
    found = quantized(tensors)
    for group in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
        names = [f"model.layers.0.{module}.weight" for module in group]
        amax = max(tensors[name].float().abs().max() for name in names)
        for name in names:
            assert torch.equal(found[name].per_tensor_scale, amax / 2688)
            assert torch.equal(tensor_of(found[name]).dequantize(), quantize(tensors[name], amax=amax).dequantize())


@pytest.mark.parametrize(("round_mode", "kept"), [("rne", 0), ("stochastic", 0), ("stochastic", 1 << 30)])
def test_chunks_are_bitwise_equal_to_the_weight(quantized, tmp_path, monkeypatch, round_mode, kept):
    names = [f"layers.{i}.{name}.weight" for i in range(2) for name in ("q_proj", "k_proj", "out")]
    settings = {"spec": QuantizeSpec(round_mode=round_mode), "seed": 7}
    quantized({name: torch.randn(300, 48) for name in names}, "whole", **settings)
    monkeypatch.setattr(quantizing, "CHUNK", 48 * 4 * 128)
    monkeypatch.setattr(quantizing, "KEPT_BYTES", kept)
    monkeypatch.setattr(quantizing, "STRIP", 1)
    monkeypatch.setattr(safetensors, "_PIECE", 1000)
    torch.set_num_threads(3)  # each takes some strips
    whole, rows = FolderCheckpoint.chunks, []
    monkeypatch.setattr(FolderCheckpoint, "chunks", lambda *a: (rows.append(a[2]), whole(*a))[1])
    quantized(None, "pieces", **settings)
    assert set(rows) == {300 if kept else 128} and same_files(tmp_path / "whole", tmp_path / "pieces")


def test_stochastic_rounding_follows_the_seed_and_the_name(quantized, tmp_path):
    tensors = {f"{name}.weight": torch.ones(16, 32).mul(0.3).index_fill(1, torch.tensor([0]), 6.0) for name in "ab"}
    write_dense(tmp_path / "src", tensors)
    for seed in "01":
        quantized(None, seed, spec=QuantizeSpec(round_mode="stochastic"), seed=int(seed))
    codes = [content(tmp_path / seed) for seed in "01"]
    assert codes[0]["a.weight"] != codes[1]["a.weight"] and codes[0]["a.weight"] != codes[0]["b.weight"]


def test_what_is_quantized(quantized):
    everything = quantized().keys()
    down = {f"model.layers.{i}.mlp.down_proj.weight" for i in (0, 1)}
    assert everything - quantized(None, "a", exclude=["*.down_proj"]).keys() == down
    of_layer = {name for name in everything if ".0." in name}
    assert everything - quantized(None, "b", exclude=[r"re:model\.layers\.0"]).keys() == of_layer
    assert quantized(None, "c", include=["lm_head"]).keys() - everything == {"lm_head.weight"}


PARTS = ("gate_proj", "up_proj", "down_proj")
EXPERTS = [f"model.layers.0.mlp.experts.{e}.{part}.weight" for e in range(2) for part in PARTS]
HALVES = {
    "dense": (None, {"exclude": ["*.v_proj"]}, r"self_attn\.v_proj\.weight, .* are dense, but linears that servers"),
    "static scales": (
        None, {"input_amax": {"model.layers.0.self_attn.q_proj": 3.0, "model.layers.1.mlp.down_proj": 1.0}},
        r"0\.self_attn\.k_proj\.weight, .*v_proj\.weight are weight-only .* are W4A4",
    ),
    "experts": (
        [*EXPERTS, "model.layers.0.mlp.gate.weight"], {"exclude": ["*.down_proj"]},
        r"experts\.0\.down_proj\.weight, .*experts\.1\.down_proj\.weight are dense",
    ),
}  # fmt: skip


@pytest.mark.parametrize("half", HALVES)
def test_half_of_what_servers_join_warns(quantized, recwarn, half):
    names, options, message = HALVES[half]
    tensors = None if names is None else {name: torch.randn(32, 32) for name in names}
    quantized(tensors, "all")  # the router is no expert
    assert not [each for each in recwarn if "servers join" in str(each.message)]
    with pytest.warns(UserWarning, match=message):
        quantized(None, **options)


@pytest.mark.parametrize("is_mixture", [False, True])
def test_experts_in_one_tensor_stay_dense_and_are_named(tmp_path, quantized, is_mixture, recwarn):
    """Llama 4's and, by the configuration, GraniteMoE's; not a convolution of 16 taps in a model without experts."""
    tensors = {"moe.input_linear.weight": torch.randn(2, 32, 16), "conv.weight": torch.randn(32, 1, 16)}
    write_dense(tmp_path / "src", {**dense_tensors(1), **tensors, "mlp.experts.down_proj": torch.randn(2, 32, 16)})
    edit_json(tmp_path / "src/config.json", lambda c: c.update({"num_local_experts": 2} if is_mixture else {}))
    quantized()
    (named,) = [str(each.message) for each in recwarn if "experts in one tensor stay dense" in str(each.message)]
    assert "mlp.experts.down_proj [2, 32, 16]" in named and "conv" not in named
    assert ("moe.input_linear.weight [2, 32, 16]" in named) == is_mixture


@pytest.mark.parametrize(
    ("first", "second", "transposed"),
    [
        ("mlp.experts.gate_up_proj", "mlp.experts.down_proj", False),
        ("mlp.experts.gate_up_proj", "mlp.experts.down_proj", True),  # Qwen3-VL-MoE's files
        ("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight", False),  # GraniteMoE
        ("mlp.experts.w13_weight", "mlp.experts.w2_weight", False),  # Inkling 2, rows of gate and up alternate
    ],
)
def test_experts_of_one_tensor_become_weights_of_their_own(quantized, first, second, transposed):
    gate, up, down = (torch.randn(3, *shape).bfloat16() for shape in ((32, 48), (32, 48), (48, 32)))
    both = torch.stack([gate, up], 2).flatten(1, 2) if "w13" in first else torch.cat([gate, up], 1)
    stacks = {f"model.layers.0.{first}": both, f"model.layers.0.{second}": down}
    found = quantized({n: t.mT.contiguous() if transposed else t for n, t in stacks.items()})
    assert len(found) == 9
    for e in range(3):
        path = f"model.layers.0.{first.partition('.')[0]}.experts.{e}"
        amax = torch.stack([gate[e], up[e]]).abs().amax()
        for name, weight, largest in (("gate_proj", gate, amax), ("up_proj", up, amax), ("down_proj", down, None)):
            expected = quantize(weight[e], amax=largest)
            assert torch.equal(tensor_of(found[f"{path}.{name}.weight"]).dequantize(), expected.dequantize()), name


def test_layers_of_a_drafter_stay_dense(tmp_path, quantized):
    """DeepSeek's, behind the last layer, and Qwen3-Next's."""
    of_mtp = {
        name.replace("model.layers.1", "mtp.layers.0"): t for name, t in dense_tensors().items() if "layers.1" in name
    }
    write_dense(tmp_path / "src", {**dense_tensors(), **of_mtp})
    edit_json(tmp_path / "src/config.json", lambda config: config.update(num_hidden_layers=1))
    found = quantized()
    assert found and all(name.startswith("model.layers.0.") for name in found)


def test_what_does_not_fit_stays_dense_and_is_named(tmp_path, quantized):
    tensors = {"a.weight": torch.randn(16, 32), "b.weight": torch.randn(16, 40), "conv.weight": torch.randn(4, 16, 3)}
    tensors["c.weight"] = torch.ones(16, 32).double()
    with pytest.warns(UserWarning, match=r"b\.weight \[16, 40\] float32, c\.weight \[16, 32\] float64") as warned:
        assert quantized(tensors).keys() == {"a.weight"}
    assert {each.filename for each in warned} == {__file__}
    with checkpoints.read(tmp_path / "dst") as read:
        assert torch.equal(read.dense("b.weight"), tensors["b.weight"])
    write_dense(tmp_path / "double", {"c.weight": tensors["c.weight"]})
    with (
        pytest.warns(UserWarning, match="left dense"),
        pytest.raises(ValueError, match=r"found none: left dense \(float64 cannot be NVFP4\): c"),
    ):
        checkpoints.quantize(tmp_path / "double", tmp_path / "x", progress=False)


def test_static_activation_scales_make_it_w4a4(quantized):
    amax = {"model.layers.0.self_attn.q_proj": 3.0, "model.layers.0.self_attn.k_proj.weight": 5.0}
    found = quantized(input_amax={**amax, "model.layers.0.self_attn.v_proj": 4.0})
    assert found["model.layers.0.self_attn.q_proj.weight"].input_scale == torch.tensor(5.0) / 2688
    assert found["model.layers.0.mlp.up_proj.weight"].input_scale is None


REFUSED = {
    r"'\*\.no_proj' matches no linear": {"exclude": "*.no_proj"},  # one pattern, not its letters
    "found none": {"exclude": ["*_proj"]},
    r"'lm_head' matches no linear .*: its output layer .* quantize_lm_head=True quantizes": {"include": ["lm_head"]},
    "names nothing.weight": {"input_amax": {"nothing": 1.0}},
    "Hadamard": {"spec": QuantizeSpec(hadamard_sign=True)},
    "without row_scaled": {"spec": QuantizeSpec(row_scaled=True)},
    r"has no option format; .* calls it to": {"format": "modelopt"},
    "src already exists": {"dst": "src"},
    r"config\.json already exists": {"dst": "src/config.json"},
    "expected a dense model, found NVFP4 .* checkpoints.convert": {"src": "dst"},
}


def test_refusals_write_nothing(tmp_path):
    tensors = dense_tensors(1)
    del tensors["lm_head.weight"]
    write_dense(tmp_path / "src", tensors)
    checkpoints.quantize(tmp_path / "src", tmp_path / "dst", progress=False)
    amaxes = [{"model.layers.0.mlp.up_proj": amax} for amax in (1e39, 1e-45, 0.0, -1.0, float("nan"))]
    of_amax = [("finite number above zero in float32", {"input_amax": amax}) for amax in amaxes]
    for message, options in [*REFUSED.items(), *of_amax]:
        given = {"src": "src", "dst": "x", **options}
        src, dst = tmp_path / given.pop("src"), tmp_path / given.pop("dst")
        with pytest.raises(ValueError, match=message):
            checkpoints.quantize(src, dst, progress=False, **given)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["dst", "src"]


def test_zeros_and_nan(quantized):
    tensors, down = dense_tensors(1), "model.layers.0.mlp.down_proj.weight"
    q, k = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qk")
    tensors[down][3, 5] = float("nan")
    tensors[q].zero_()
    with pytest.warns(UserWarning, match=r"1 weights have NaN blocks, model.layers.0.mlp.down_proj.weight, and vLLM"):
        found = quantized(tensors)
    assert not tensor_of(found[q]).dequantize().any()
    assert torch.equal(found[q].per_tensor_scale, found[k].per_tensor_scale)
