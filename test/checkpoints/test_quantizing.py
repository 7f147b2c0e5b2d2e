"""Quantizing a folder: bitwise equality with quantize(), shared scales, and memory."""

import pytest
import torch
from helpers.checkpoint_folders import content, dense_tensors, edit_json, same_files, write_dense

from nvfp4_tensor import QuantizeSpec, checkpoints, quantize
from nvfp4_tensor.checkpoints import quantizing, tensor_of


def options(**more):
    return {"progress": False, **more}


def amax_of(tensors, *names):
    return max(tensors[name].float().abs().max() for name in names)


@pytest.mark.parametrize("spec", [QuantizeSpec(four_over_six=True), QuantizeSpec(block_rows=16)], ids=str)
def test_the_bits_of_quantize(tmp_path, spec):
    tensors = write_dense(tmp_path / "src")
    checkpoints.quantize(tmp_path / "src", tmp_path / "dst", spec=spec, **options())
    with checkpoints.read(tmp_path / "dst") as read:
        quantized = {name for name, entry in read.entries.items() if entry.quantized}
        assert quantized == {name for name in tensors if "_proj" in name}
        name = "model.layers.1.mlp.down_proj.weight"
        expected = quantize(tensors[name], spec)
        assert torch.equal(tensor_of(read.linear(name)).dequantize(), expected.dequantize())
        assert torch.equal(read.linear(name).qdata, expected.qdata)
        for other in tensors.keys() - quantized:
            assert torch.equal(read.dense(other), tensors[other])


@pytest.mark.smoke
def test_joined_linears_share_the_largest_amax(tmp_path):
    tensors = write_dense(tmp_path / "src")
    checkpoints.quantize(tmp_path / "src", tmp_path / "dst", **options())
    with checkpoints.read(tmp_path / "dst") as read:
        for group in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
            names = [f"model.layers.0.{module}.weight" for module in group]
            amax = amax_of(tensors, *names)
            for name in names:
                expected = quantize(tensors[name], amax=amax)
                assert torch.equal(read.linear(name).per_tensor_scale, amax / 2688)
                assert torch.equal(tensor_of(read.linear(name)).dequantize(), expected.dequantize())


@pytest.mark.parametrize("round_mode", ["rne", "stochastic"])
@pytest.mark.parametrize("kept", [0, 1 << 30])
def test_chunks_are_bitwise_equal_to_the_weight(tmp_path, monkeypatch, round_mode, kept):
    tensors = {
        f"layers.{i}.{name}.weight": torch.randn(300, 48) for i in range(2) for name in ("q_proj", "k_proj", "out")
    }
    write_dense(tmp_path / "src", tensors)
    settings = options(spec=QuantizeSpec(round_mode=round_mode), seed=7)
    checkpoints.quantize(tmp_path / "src", tmp_path / "whole", **settings)
    monkeypatch.setattr(quantizing, "CHUNK", 48 * 4 * 128)
    monkeypatch.setattr(quantizing, "KEPT_BYTES", kept)
    checkpoints.quantize(tmp_path / "src", tmp_path / "pieces", **settings)
    assert same_files(tmp_path / "whole", tmp_path / "pieces")


def test_stochastic_rounding_follows_the_seed_and_the_name(tmp_path):
    tensors = {f"{name}.weight": torch.ones(16, 32).mul(0.3).index_fill(1, torch.tensor([0]), 6.0) for name in "ab"}
    write_dense(tmp_path / "src", tensors)
    codes = {}
    for seed in (0, 1):
        spec = QuantizeSpec(round_mode="stochastic")
        checkpoints.quantize(tmp_path / "src", tmp_path / f"{seed}", spec=spec, seed=seed, **options())
        codes[seed] = content(tmp_path / f"{seed}")
    assert codes[0]["a.weight"] != codes[1]["a.weight"] and codes[0]["a.weight"] != codes[0]["b.weight"]


def test_what_is_quantized(tmp_path):
    write_dense(tmp_path / "src")

    def chosen(**more):
        checkpoints.quantize(tmp_path / "src", tmp_path / "x", **options(**more))
        with checkpoints.read(tmp_path / "x") as read:
            names = {name for name, entry in read.entries.items() if entry.quantized}
        for file in (tmp_path / "x").iterdir():
            file.unlink()
        return names

    everything = chosen()
    assert everything - chosen(exclude=["*.down_proj"]) == {f"model.layers.{i}.mlp.down_proj.weight" for i in (0, 1)}
    assert everything - chosen(exclude=[r"re:model\.layers\.0"]) == {name for name in everything if ".0." in name}
    assert chosen(include=["lm_head"]) - everything == {"lm_head.weight"}
    with pytest.raises(ValueError, match=r"'\*\.w2' matches no linear"):
        chosen(exclude=["*.w2"])
    with pytest.raises(ValueError, match="found none"):
        chosen(exclude=["*_proj"])


def warned_by(tensors, folder, message, **more):
    """Quantizes a dense folder of these tensors, which has to warn."""
    write_dense(folder / "src", tensors)
    with pytest.warns(UserWarning, match=message):
        checkpoints.quantize(folder / "src", folder / "dst", **options(**more))


def test_half_a_group_warns(tmp_path):
    """Linears that servers join, some of which are dense, or have no static scale."""
    for folder in "ab":
        (tmp_path / folder).mkdir()
    left = r"layers\.0\.self_attn\.v_proj\.weight, .* are dense, but linears that servers join them"
    warned_by(dense_tensors(), tmp_path / "a", left, exclude=["*.v_proj"])
    amax = {"model.layers.0.self_attn.q_proj": 3.0, "model.layers.1.mlp.down_proj": 1.0}
    mixed = r"0\.self_attn\.k_proj\.weight, .*v_proj\.weight are weight-only .* are W4A4"
    warned_by(dense_tensors(), tmp_path / "b", mixed, input_amax=amax)


def test_half_the_experts_warn(tmp_path):
    parts = ("gate_proj", "up_proj", "down_proj")
    names = [f"model.layers.0.mlp.experts.{e}.{part}.weight" for e in range(2) for part in parts]
    tensors = {name: torch.randn(32, 32) for name in (*names, "model.layers.0.mlp.gate.weight")}
    message = r"experts\.0\.down_proj\.weight, .*experts\.1\.down_proj\.weight are dense"
    warned_by(tensors, tmp_path, message, exclude=["*.down_proj"])
    checkpoints.quantize(tmp_path / "src", tmp_path / "all", **options())  # the router is no expert


def test_a_tied_output_layer_that_is_asked_for_by_name(tmp_path):
    tensors = dense_tensors(1)
    del tensors["lm_head.weight"]
    write_dense(tmp_path / "src", tensors)
    message = r"'lm_head' matches no linear .*: its output layer .* quantize_lm_head=True quantizes"
    with pytest.raises(ValueError, match=message):
        checkpoints.quantize(tmp_path / "src", tmp_path / "dst", **options(include=["lm_head"]))


@pytest.mark.parametrize("is_mixture", [False, True])
def test_experts_in_one_tensor_stay_dense_and_are_named(tmp_path, is_mixture, recwarn):
    """Llama 4's and, by the configuration, GraniteMoE's; not a convolution of 16 taps in a model without experts."""
    tensors = {"moe.input_linear.weight": torch.randn(2, 32, 16), "conv.weight": torch.randn(32, 1, 16)}
    tensors["mlp.experts.down_proj"] = torch.randn(2, 32, 16)
    write_dense(tmp_path / "src", {**dense_tensors(1), **tensors})
    edit_json(tmp_path / "src/config.json", lambda c: c.update({"num_local_experts": 2} if is_mixture else {}))
    checkpoints.quantize(tmp_path / "src", tmp_path / "dst", **options())
    (named,) = [str(each.message) for each in recwarn if "experts in one tensor stay dense" in str(each.message)]
    assert "mlp.experts.down_proj [2, 32, 16]" in named and "conv" not in named
    assert ("moe.input_linear.weight [2, 32, 16]" in named) == is_mixture


def test_what_does_not_fit_stays_dense_and_is_named(tmp_path):
    tensors = {"a.weight": torch.randn(16, 32), "b.weight": torch.randn(16, 40)}
    tensors["c.weight"] = torch.ones(16, 32).double()
    write_dense(tmp_path / "src", {**tensors, "conv.weight": torch.randn(4, 16, 3)})
    with pytest.warns(UserWarning, match=r"b\.weight \[16, 40\] float32, c\.weight \[16, 32\] float64"):
        checkpoints.quantize(tmp_path / "src", tmp_path / "dst", **options())
    with checkpoints.read(tmp_path / "dst") as read:
        assert [name for name, entry in read.entries.items() if entry.quantized] == ["a.weight"]
        assert torch.equal(read.dense("b.weight"), tensors["b.weight"])
    write_dense(tmp_path / "double", {"a.weight": torch.randn(16, 32).double()})
    with (
        pytest.warns(UserWarning, match="left dense"),
        pytest.raises(ValueError, match=r"found none: left dense \(float64 cannot be NVFP4\): a"),
    ):
        checkpoints.quantize(tmp_path / "double", tmp_path / "x", **options())


def test_static_activation_scales_make_it_w4a4(tmp_path):
    write_dense(tmp_path / "src")
    amax = {"model.layers.0.self_attn.q_proj": 3.0, "model.layers.0.self_attn.k_proj.weight": 5.0}
    amax["model.layers.0.self_attn.v_proj"] = 4.0
    checkpoints.quantize(tmp_path / "src", tmp_path / "dst", input_amax=amax, **options())
    with checkpoints.read(tmp_path / "dst") as read:
        assert read.linear("model.layers.0.self_attn.q_proj.weight").input_scale == torch.tensor(5.0) / 2688
        assert read.linear("model.layers.0.mlp.up_proj.weight").input_scale is None
    for bad, message in (
        ({"nothing": 1.0}, "names nothing.weight"),
        ({"model.layers.0.mlp.up_proj": 0.0}, "above zero"),
    ):
        with pytest.raises(ValueError, match=message):
            checkpoints.quantize(tmp_path / "src", tmp_path / "no", input_amax=bad, **options())
    assert not (tmp_path / "no").exists() and not (tmp_path / "no.partial").exists()


def test_sources_that_raise_errors(tmp_path):
    write_dense(tmp_path / "src")
    with pytest.raises(ValueError, match="Hadamard"):
        checkpoints.quantize(tmp_path / "src", tmp_path / "x", spec=QuantizeSpec(hadamard_sign=True), **options())
    with pytest.raises(ValueError, match="without row_scaled"):
        checkpoints.quantize(tmp_path / "src", tmp_path / "x", spec=QuantizeSpec(row_scaled=True), **options())
    with pytest.raises(ValueError, match=r"'\*\.no_proj' matches no linear"):  # one pattern, not its letters
        checkpoints.quantize(tmp_path / "src", tmp_path / "x", exclude="*.no_proj", **options())
    with pytest.raises(ValueError, match=r"has no option format; .* convert call it to"):
        checkpoints.quantize(tmp_path / "src", tmp_path / "x", format="modelopt", **options())
    checkpoints.quantize(tmp_path / "src", tmp_path / "dst", **options())
    with pytest.raises(ValueError, match="expected a dense model, found one quantized by modelopt"):
        checkpoints.quantize(tmp_path / "dst", tmp_path / "x", **options())
    with pytest.raises(ValueError, match="already exists"):
        checkpoints.quantize(tmp_path / "src", tmp_path / "dst", **options())
    assert sorted(each.name for each in tmp_path.iterdir()) == ["dst", "src"]


def test_zeros_and_nan(tmp_path):
    tensors, down = dense_tensors(1), "model.layers.0.mlp.down_proj.weight"
    q, k = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qk")
    tensors[down][3, 5] = float("nan")
    tensors[q].zero_()
    warned_by(tensors, tmp_path, r"1 weights have NaN blocks, model.layers.0.mlp.down_proj.weight, and vLLM")
    with checkpoints.read(tmp_path / "dst") as read:
        assert not tensor_of(read.linear(q)).dequantize().any()
        assert torch.equal(read.per_tensor_scale(q), read.per_tensor_scale(k))
