"""GGUF: its bytes against the package gguf, its names and orders against transformers, and errors."""

import pytest
import torch
from helpers.checkpoints import DOWN, TINY, Q, same_parts, tiny_tensors
from helpers.checkpoints import write_gguf as write

from nvfp4_tensor import QuantizeSpec, checkpoints, quantize
from nvfp4_tensor.checkpoints import parts_of, tensor_of
from nvfp4_tensor.checkpoints.formats.gguf.format import FORMAT
from nvfp4_tensor.checkpoints.formats.gguf.names import to_gguf_name

gguf = pytest.importorskip("gguf")


# --- bytes -----------------------------------------------------------------------------------------------------------


# --- files -----------------------------------------------------------------------------------------------------------


def test_round_trip(tmp_path, tensors):
    with write(tmp_path / "a.gguf", tensors) as checkpoint:
        assert FORMAT.detect(tmp_path / "a.gguf")
        assert set(checkpoint.entries) == set(tensors)
        for name, want in tensors.items():
            entry = checkpoint.entries[name]
            assert entry.shape == tuple(want.shape)
            if entry.quantized:
                assert same_parts(checkpoint.linear(name), parts_of(want)), name
            else:
                assert torch.equal(checkpoint.dense(name).to(want.dtype), want), name
        for key, value in TINY.items():
            assert checkpoint.config[key] == value, key
        FORMAT.write(checkpoint, tmp_path / "b.gguf", progress=False)
    assert (tmp_path / "b.gguf").read_bytes() == (tmp_path / "a.gguf").read_bytes()


def test_static_activation_scales(tmp_path, tensors):
    static = tensors[DOWN]._replace(activation_spec=QuantizeSpec(), activation_amax=torch.tensor(2688.0 * 3))
    dynamic = tensors[Q]._replace(activation_spec=QuantizeSpec())
    with write(tmp_path / "a.gguf", {**tensors, DOWN: static, Q: dynamic}) as checkpoint:
        assert checkpoint.linear(DOWN).input_scale == 3.0
        assert checkpoint.entries[Q].quantizes_activations and not checkpoint.entries[Q].has_input_scale
        assert same_parts(checkpoint.linear(Q), parts_of(dynamic))
        assert not checkpoint.entries["model.layers.0.mlp.down_proj.weight"].quantizes_activations


@pytest.mark.parametrize(("kind", "error"), [("F32", 0), ("BF16", 0), ("F16", 1e-3), ("Q8_0", 8e-3), ("q4_0", 0.13)])
def test_what_dense_matrices_are_stored_as(tmp_path, tensors, kind, error):
    with write(tmp_path / "a.gguf", tensors, dense=kind) as checkpoint:
        got, want = checkpoint.dense("model.embed_tokens.weight").float(), tensors["model.embed_tokens.weight"].float()
        assert checkpoint._tensors["token_embd.weight"].tensor_type.name == kind.upper()
        assert checkpoint._tensors["blk.0.attn_norm.weight"].tensor_type.name == "F32"
    assert (got - want).abs().max() <= error * want.abs().max()


# --- the ways of the room --------------------------------------------------------------------------------------------


def test_quantized_converted_loaded_and_saved(tmp_path, tensors):
    """A dense GGUF is quantized to a folder; that is converted to GGUF, loaded into a model and saved again."""
    transformers = pytest.importorskip("transformers")
    dense = tiny_tensors()
    write(tmp_path / "dense.gguf", dense, dense="q8_0")
    assert checkpoints.detect(tmp_path / "dense.gguf") == "gguf"
    with FORMAT.read(tmp_path / "dense.gguf") as source:
        want = {name: source.dense(name) for name in source.entries}
    checkpoints.quantize(tmp_path / "dense.gguf", tmp_path / "folder", progress=False)
    with pytest.warns(UserWarning, match=r"a\.gguf gets no tokenizer.*pass tokenizer=FOLDER"):
        checkpoints.convert(tmp_path / "folder", tmp_path / "a.gguf", to="gguf", progress=False)
    with FORMAT.read(tmp_path / "a.gguf") as checkpoint:
        up = quantize(want[DOWN])  # it shares its scale with none
        assert same_parts(checkpoint.linear(DOWN), parts_of(up))
        config = transformers.AutoConfig.for_model(
            **{k: v for k, v in checkpoint.config.items() if k != "architectures"}
        )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    checkpoints.load(model, tmp_path / "a.gguf", progress=False)
    assert torch.equal(model.model.layers[1].mlp.down_proj.weight.dequantize(), up.dequantize())
    checkpoints.save(model, tmp_path / "b.gguf", format="gguf", progress=False, tokenizer=None)
    with FORMAT.read(tmp_path / "a.gguf") as a, FORMAT.read(tmp_path / "b.gguf") as b:
        for name, entry in a.entries.items():
            if entry.quantized:
                assert same_parts(a.linear(name), b.linear(name)), name
            else:
                assert torch.equal(a.dense(name).bfloat16(), b.dense(name).bfloat16()), name
    with pytest.raises(ValueError, match=r"found NVFP4 in model\.layers.* use checkpoints\.convert"):
        checkpoints.quantize(tmp_path / "a.gguf", tmp_path / "c", progress=False)


@pytest.mark.parametrize("to", ["modelopt", "comfy", "mlx"])
def test_to_every_other_format_and_back(tmp_path, tensors, to):
    ones = {n: t._replace(per_tensor_scale=torch.ones(())) if "_proj" in n else t for n, t in tensors.items()}
    write(tmp_path / "a.gguf", ones)
    other = tmp_path / ("b.safetensors" if to == "comfy" else "b")
    checkpoints.convert(tmp_path / "a.gguf", other, to=to, progress=False)
    with checkpoints.read(tmp_path / "a.gguf") as a, checkpoints.read(other) as b:
        assert b.format == to and set(a.entries) == set(b.entries)
        for name, entry in a.entries.items():
            if entry.quantized:
                assert same_parts(a.linear(name), b.linear(name)), name
            else:
                assert torch.equal(a.dense(name), b.dense(name)), name
    if to != "comfy":  # which has no config.json
        checkpoints.convert(other, tmp_path / "c.gguf", to="gguf", progress=False, tokenizer=None)
        assert (tmp_path / "c.gguf").read_bytes() == (tmp_path / "a.gguf").read_bytes()


# --- refusals --------------------------------------------------------------------------------------------------------


def test_what_cannot_be_written(tmp_path, tensors):
    nan = quantize(torch.full((192, 128), float("nan")))
    rows = torch.cat([quantize(torch.randn(64, 128)), quantize(torch.randn(64, 128) * 9)])
    cases = [
        (TINY, {DOWN: quantize(torch.randn(128, 96))}, {}, f"{DOWN} has 96 columns.* multiple of 64"),
        (TINY, {"model.layers.0.mlp.up_proj.weight": nan}, {}, "1536 NaN blocks"),
        (TINY, {Q: rows}, {}, r"per-tensor scales \(128,\)"),
        (TINY, {"model.layers.0.extra.weight": torch.ones(2, 2)}, {}, "extra.weight is not a tensor of"),
        ({**TINY, "model_type": "opt"}, {}, {}, "qwen2, qwen3, mixtral, qwen3_moe, .*, not of 'opt'"),
        ({**TINY, "hidden_act": "gelu"}, {}, {}, "hidden_act silu, not 'gelu'"),
        ({**TINY, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, {}, {}, "type 'yarn'"),
        ({**TINY, "vocab_size": None}, {}, {}, "no vocab_size"),
        (TINY, {"model.norm.weight": torch.ones(128, dtype=torch.int64)}, {}, "is torch.int64"),
        ({**TINY, "model_type": "qwen2"}, {}, {}, "qwen2's feed-forward weights, and .* or pass lossy=True"),
        (TINY, {"model.layers.0.mlp.up_proj.bias": torch.ones(192)}, {}, "with a bias: leave .*up_proj.weight dense"),
        (TINY, {"model.layers.0.mlp.experts.0.up_proj.weight": torch.ones(2, 2)}, {}, "not a tensor of llama.cpp"),
        (TINY, {}, {"dense": "Q3_K"}, "dense: expected one of F32, F16"),
        (TINY, {}, {"shard": 3}, "no option shard"),
    ]  # fmt: skip
    for config, changes, options, message in cases:
        with pytest.raises(ValueError, match=message):
            write(tmp_path / "a.gguf", {**tensors, **changes}, config, **options)
        assert list(tmp_path.iterdir()) == [], message


def test_a_file_that_is_there_stays(tmp_path, tensors):
    (tmp_path / "a.gguf").write_bytes(b"precious")
    with pytest.raises(ValueError, match="already exists"):
        write(tmp_path / "a.gguf", tensors)
    assert (tmp_path / "a.gguf").read_bytes() == b"precious"


# --- what llama.cpp multiplies by no per-tensor scale ----------------------------------------------------------------

QWEN2 = {**TINY, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}


def as_llama_cpp_reads(path):
    """The weights of a GGUF by llama.cpp's names, its own blocks decoded; feed-forward scales of qwen2 left out."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name, tensor in tensors.items():
        if tensor.tensor_type.name == "NVFP4":
            scale = 1.0 if ".ffn_" in name else float(tensors[f"{name.removesuffix('weight')}scale"].data[0])
            yield name, torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type)).double() * scale


@pytest.mark.parametrize("spec", [None, QuantizeSpec(scale_search=True)], ids=str)
def test_qwen2_is_quantized_with_scales_that_llama_cpp_reads(tmp_path, spec):
    dense = tiny_tensors(QWEN2)
    write(tmp_path / "dense.gguf", dense, QWEN2)
    checkpoints.quantize(tmp_path / "dense.gguf", tmp_path / "a.gguf", to="gguf", spec=spec, progress=False)
    with checkpoints.read(tmp_path / "a.gguf") as read:
        ours = {to_gguf_name(name): (name, read.linear(name)) for name, e in read.entries.items() if e.quantized}
    assert len(ours) == 14
    for gguf_name, values in as_llama_cpp_reads(tmp_path / "a.gguf"):
        name, parts = ours[gguf_name]
        assert (parts.per_tensor_scale == 1) == (".mlp." in name), name
        assert torch.allclose(values, tensor_of(parts, torch.float32).dequantize().double(), rtol=1e-6)
        error = (values - dense[name].double()).norm() / dense[name].double().norm()
        assert error < 0.12, (name, error)


@pytest.mark.parametrize("lossy", [False, True])
def test_scales_of_qwen2_are_folded(tmp_path, lossy):
    """A power of two goes into the block scales; what does not is quantized again, where that is allowed."""
    up, down = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"
    exact = quantize(torch.randn(192, 128), amax=2688.0)._replace(per_tensor_scale=torch.tensor(2.0**5))
    inexact = quantize(torch.randn(128, 192))
    tensors = tiny_tensors(QWEN2) | {up: exact} | ({down: inexact} if lossy else {})
    with write(tmp_path / "a.gguf", tensors, QWEN2, lossy=lossy) as read:
        parts = {name: read.linear(name) for name in (up, down)[: 1 + lossy]}
    assert all(each.per_tensor_scale == 1 for each in parts.values())
    assert torch.equal(tensor_of(parts[up], torch.float32).dequantize(), exact.dequantize())
    theirs = dict(as_llama_cpp_reads(tmp_path / "a.gguf"))
    assert torch.allclose(theirs["blk.0.ffn_up.weight"], exact.dequantize().double(), rtol=1e-6)
    if lossy:
        off = (theirs["blk.0.ffn_down.weight"] - inexact.dequantize().double()).norm() / inexact.dequantize().norm()
        assert 0 < off < 0.1
    else:
        with pytest.raises(ValueError, match=r"down_proj\.weight cannot be folded .* pass lossy=True"):
            write(tmp_path / "b.gguf", tensors | {down: inexact}, QWEN2)
        assert not (tmp_path / "b.gguf").exists()
