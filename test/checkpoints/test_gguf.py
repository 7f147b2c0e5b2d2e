"""GGUF: its bytes against the package gguf, its names and orders against transformers, and what it refuses."""

import numpy as np
import pytest
import torch
from helpers.checkpoints import TINY, InMemory, quantized, same_parts, tiny_tensors

from nvfp4_tensor import QuantizeSpec, checkpoints, quantize
from nvfp4_tensor.checkpoints import parts_of, tensor_of
from nvfp4_tensor.checkpoints.gguf import FORMAT
from nvfp4_tensor.checkpoints.gguf_blocks import pack_blocks, unpack_blocks, unpack_mxfp4
from nvfp4_tensor.checkpoints.mxfp4 import to_nvfp4

gguf = pytest.importorskip("gguf")

Q = "model.layers.0.self_attn.q_proj.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def tensors():
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    return quantized(tiny_tensors())


def write(path, tensors, config=TINY, **options):
    options.setdefault("tokenizer", None)
    FORMAT.write(InMemory(tensors, config), path, progress=False, **options)
    return FORMAT.read(path)


# --- bytes -----------------------------------------------------------------------------------------------------------


def test_bytes_decode_as_the_package_decodes_them():
    parts = parts_of(quantize(torch.randn(48, 256)))
    data = pack_blocks(parts.qdata, parts.scale)
    assert data.shape == (48, 256 // 64 * 36)
    values = gguf.quants.dequantize(data.numpy(), gguf.GGMLQuantizationType.NVFP4)
    ones = parts.replace(per_tensor_scale=torch.ones(()))
    assert torch.equal(torch.from_numpy(values), tensor_of(ones, torch.float32).dequantize())
    codes, scale = unpack_blocks(data)
    assert torch.equal(codes, parts.qdata)
    assert torch.equal(scale.view(torch.uint8), parts.scale.view(torch.uint8))


def test_every_byte_stands_where_the_format_says():
    codes = torch.randint(256, (3, 64), dtype=torch.uint8)
    scale = torch.randint(0x7F, (3, 8), dtype=torch.uint8)
    data = pack_blocks(codes, scale.view(torch.float8_e4m3fn))
    element = lambda row, k: int(codes[row, k // 2]) >> 4 * (k % 2) & 15  # noqa: E731
    for row in range(3):
        for block in range(8):
            start = block // 4 * 36
            assert data[row, start + block % 4] == scale[row, block]
            for j in range(8):
                low, high = element(row, 16 * block + j), element(row, 16 * block + j + 8)
                assert data[row, start + 4 + block % 4 * 8 + j] == low | high << 4


def test_mxfp4_bytes():
    data = torch.randint(256, (5, 2, 17), dtype=torch.uint8)
    data[..., 0] = torch.randint(110, 120, (5, 2))
    values = gguf.quants.dequantize(data.view(5, -1).numpy(), gguf.GGMLQuantizationType.MXFP4)
    t = to_nvfp4(*unpack_mxfp4(data.view(5, -1)), orig_dtype=torch.float32)
    assert torch.equal(t.dequantize(), torch.from_numpy(values))


# --- files -----------------------------------------------------------------------------------------------------------


def test_there_and_back(tmp_path, tensors):
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


def test_transformers_reads_the_dense_file(tmp_path):
    """Names, the order of q's and k's rows, and the configuration, by another reader."""
    transformers = pytest.importorskip("transformers")
    tensors = tiny_tensors(dtype=torch.float32)
    write(tmp_path / "a.gguf", tensors, tokenizer=None)
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = load_gguf_checkpoint(str(tmp_path / "a.gguf"))["config"]
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{k: v for k, v in TINY.items() if k != "model_type"})
    )
    state = load_gguf_checkpoint(str(tmp_path / "a.gguf"), return_tensors=True, model_to_load=model)["tensors"]
    assert {name: tuple(t.shape) for name, t in state.items()} == {n: tuple(t.shape) for n, t in tensors.items()}
    for name, want in tensors.items():
        assert torch.equal(torch.as_tensor(state[name]), want), name
    for key in ("hidden_size", "num_key_value_heads", "rms_norm_eps", "vocab_size", "max_position_embeddings"):
        assert config[key] == pytest.approx(TINY[key])


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "mistral"])
def test_other_architectures(tmp_path, model_type):
    transformers = pytest.importorskip("transformers")
    config = {**TINY, "model_type": model_type, "sliding_window": None}
    tensors = tiny_tensors(config)
    ones = {n: quantize(t, amax=2688.0) if "_proj.weight" in n else t for n, t in tensors.items()}
    assert ("model.layers.0.self_attn.q_proj.bias" in tensors) == (model_type == "qwen2")
    with write(tmp_path / "a.gguf", ones, config) as checkpoint:
        read = checkpoint.config
        assert read["model_type"] == {"mistral": "llama"}.get(model_type, model_type)
        for name, want in ones.items():
            if checkpoint.entries[name].quantized:
                assert same_parts(checkpoint.linear(name), parts_of(want)), name
            else:
                assert torch.equal(checkpoint.dense(name).to(want.dtype), want), name
    transformers.AutoConfig.for_model(**{k: v for k, v in read.items() if k != "architectures"})


def test_tied_output_is_left_out(tmp_path, tensors):
    with write(tmp_path / "a.gguf", tensors, {**TINY, "tie_word_embeddings": True}) as checkpoint:
        assert checkpoint.config["tie_word_embeddings"] is True
        assert "lm_head.weight" not in checkpoint.entries
    head = {**tensors, "lm_head.weight": quantize(tensors["lm_head.weight"])}
    with write(tmp_path / "b.gguf", head, {**TINY, "tie_word_embeddings": True}) as checkpoint:
        assert checkpoint.config["tie_word_embeddings"] is False  # an NVFP4 output layer of its own
        assert same_parts(checkpoint.linear("lm_head.weight"), parts_of(head["lm_head.weight"]))


def test_rope_scaling_of_llama_3(tmp_path, tensors):
    transformers = pytest.importorskip("transformers")
    rope = {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = {**TINY, "rope_theta": 500000.0, "rope_scaling": rope}
    with write(tmp_path / "a.gguf", tensors, config) as checkpoint:
        factors = checkpoint._plain("rope_freqs.weight")
        assert checkpoint.config["rope_scaling"] == rope
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**{k: v for k, v in checkpoint.config.items() if k != "model_type"})
        )
    head_dim = TINY["hidden_size"] // TINY["num_attention_heads"]
    plain = 500000.0 ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    assert torch.allclose(model.model.rotary_emb.inv_freq.double(), plain / factors.double(), rtol=1e-6)
    assert factors.max() == 32.0 and factors.min() == 1.0


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
    with pytest.warns(UserWarning, match=r"a\.gguf gets no tokenizer.*tokenizer= takes one"):
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
    with pytest.raises(ValueError, match=r"found NVFP4 in model\.layers.* convert\(\) it"):
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
        (TINY, {"model.layers.0.extra.weight": torch.ones(2, 2)}, {}, "extra.weight has no name"),
        ({**TINY, "model_type": "gpt2"}, {}, {}, "qwen2, qwen3, mixtral, qwen3_moe, not of 'gpt2'"),
        ({**TINY, "hidden_act": "gelu"}, {}, {}, "hidden_act silu, not 'gelu'"),
        ({**TINY, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, {}, {}, "type 'yarn'"),
        ({**TINY, "vocab_size": None}, {}, {}, "no vocab_size"),
        (TINY, {"model.norm.weight": torch.ones(128, dtype=torch.int64)}, {}, "is torch.int64"),
        ({**TINY, "model_type": "qwen2"}, {}, {}, "qwen2's feed-forward weights, and .* amax=2688"),
        (TINY, {"model.layers.0.mlp.up_proj.bias": torch.ones(192)}, {}, "with a bias, as .*mlp.up_proj.weight has"),
        (TINY, {"model.layers.0.mlp.experts.0.up_proj.weight": torch.ones(2, 2)}, {}, "no name in llama.cpp's llama"),
        (TINY, {}, {"dense": "Q3_K"}, "dense is one of F32, F16"),
        (TINY, {}, {"shard": 3}, "no option shard"),
    ]  # fmt: skip
    for config, changes, options, message in cases:
        with pytest.raises(ValueError, match=message):
            write(tmp_path / "a.gguf", {**tensors, **changes}, config, **options)
        assert list(tmp_path.iterdir()) == [], message


def test_a_file_that_is_there_stays(tmp_path, tensors):
    (tmp_path / "a.gguf").write_bytes(b"precious")
    with pytest.raises(ValueError, match="is there already"):
        write(tmp_path / "a.gguf", tensors)
    assert (tmp_path / "a.gguf").read_bytes() == b"precious"


def test_wrong_files_are_refused_by_name(tmp_path, tensors):
    write(tmp_path / "a.gguf", tensors)
    whole = (tmp_path / "a.gguf").read_bytes()
    for length in (5, 40, 2000, len(whole) // 2, len(whole) - 64):
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"cut\.gguf"):
            FORMAT.read(tmp_path / "cut.gguf")
    (tmp_path / "other.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    assert not FORMAT.detect(tmp_path / "other.gguf") and not FORMAT.detect(tmp_path)
    with pytest.raises(ValueError, match=r"other\.gguf: expected a GGUF file"):
        FORMAT.read(tmp_path / "other.gguf")


def foreign(path, architecture="llama", **tensors):
    writer = gguf.GGUFWriter(path, architecture)
    for name, data in tensors.items():
        writer.add_tensor(name.replace("__", "."), data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_mxfp4_in_a_file_becomes_nvfp4(tmp_path, tensors):
    """A file of llama.cpp's type 39, q's rows in its order; and one of Q5_0, which is dense."""
    write(tmp_path / "a.gguf", {**tensors, Q: tensors[Q].dequantize()})
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    data = torch.randint(256, (128, 4, 17), dtype=torch.uint8)
    data[..., 0] = torch.randint(115, 125, (128, 4))
    mxfp4 = data.view(128, -1).numpy()
    writer = gguf.GGUFWriter(tmp_path / "b.gguf", "llama")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        if tensor.name == "blk.0.attn_q.weight":
            writer.add_tensor(tensor.name, mxfp4, raw_dtype=gguf.GGMLQuantizationType.MXFP4)
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with FORMAT.read(tmp_path / "b.gguf") as checkpoint:
        got = tensor_of(checkpoint.linear(Q), torch.float32).dequantize()
        assert same_parts(checkpoint.linear(DOWN), parts_of(tensors[DOWN]))
    theirs = torch.from_numpy(gguf.quants.dequantize(mxfp4, gguf.GGMLQuantizationType.MXFP4))
    want = theirs.view(4, 16, 2, 128).transpose(1, 2).reshape(128, 128)  # pairs of a head to its halves
    assert torch.equal(got, want)


def test_foreign_files_are_refused_by_name(tmp_path):
    foreign(tmp_path / "a.gguf", "bloom", token_embd__weight=np.zeros((4, 8), np.float32))
    with pytest.raises(ValueError, match=r"a\.gguf: architecture 'bloom': llama, qwen2, qwen3, qwen3moe are read"):
        FORMAT.read(tmp_path / "a.gguf")
    foreign(tmp_path / "b.gguf", token_embd__weight=np.zeros((4, 8), np.float32))
    with pytest.raises(ValueError, match=r"b\.gguf: the file has no llama\.block_count"):
        FORMAT.read(tmp_path / "b.gguf")


def test_strange_tensors_are_refused(tmp_path, tensors, monkeypatch):
    from nvfp4_tensor.checkpoints import gguf as module

    to_name = module.to_gguf_name
    monkeypatch.setattr(module, "to_gguf_name", lambda name: "blk.0.output.weight" if name == DOWN else to_name(name))
    FORMAT.write(InMemory(tensors, TINY), tmp_path / "a.gguf", progress=False, tokenizer=None)
    with pytest.raises(ValueError, match=r"no LlamaForCausalLM has: blk\.0\.output\.weight"):
        FORMAT.read(tmp_path / "a.gguf")
