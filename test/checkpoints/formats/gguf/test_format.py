"""GGUF: what files hold, what cannot be written, other types and programs, truncated files."""

import numpy as np
import pytest
import torch
from helpers.checkpoints import DOWN, TINY, InMemory, Q, same_parts, tiny_tensors
from helpers.checkpoints import write_gguf as write

from nvfp4_tensor import QuantizeSpec, checkpoints, quantize
from nvfp4_tensor.checkpoints import parts_of, tensor_of
from nvfp4_tensor.checkpoints.formats.gguf.format import FORMAT
from nvfp4_tensor.checkpoints.formats.gguf.names import TensorNames

gguf = pytest.importorskip("gguf")


def test_static_activation_scales(tmp_path, tensors):
    static = tensors[DOWN]._replace(activation_spec=QuantizeSpec(), activation_amax=torch.tensor(2688.0 * 3))
    dynamic = tensors[Q]._replace(activation_spec=QuantizeSpec())
    with write(tmp_path / "a.gguf", {**tensors, DOWN: static, Q: dynamic}) as checkpoint:
        assert checkpoint.linear(DOWN).input_scale == 3.0
        assert checkpoint.entries[Q].quantizes_activations and not checkpoint.entries[Q].has_input_scale
        assert same_parts(checkpoint.linear(Q), parts_of(dynamic))
        assert not checkpoint.entries["model.layers.0.mlp.down_proj.weight"].quantizes_activations


@pytest.mark.parametrize(("kind", "error"), [("F32", 0), ("F16", 1e-3), ("q4_0", 0.13)])
def test_what_dense_matrices_are_stored_as(tmp_path, tensors, kind, error):
    with write(tmp_path / "a.gguf", tensors, dense=kind) as checkpoint:
        got, want = checkpoint.dense("model.embed_tokens.weight").float(), tensors["model.embed_tokens.weight"].float()
        assert checkpoint._tensors["token_embd.weight"].tensor_type.name == kind.upper()
        assert checkpoint._tensors["blk.0.attn_norm.weight"].tensor_type.name == "F32"
    assert (got - want).abs().max() <= error * want.abs().max()


def test_a_dense_file_is_quantized_loaded_and_saved(tmp_path):
    transformers = pytest.importorskip("transformers")
    write(tmp_path / "dense.gguf", tiny_tensors(), dense="q8_0")
    with FORMAT.read(tmp_path / "dense.gguf") as source:
        want = quantize(source.dense(DOWN))  # it shares its scale with none
    checkpoints.quantize(tmp_path / "dense.gguf", tmp_path / "folder", progress=False)
    with pytest.warns(UserWarning, match=r"a\.gguf gets no tokenizer.*pass tokenizer=FOLDER"):
        checkpoints.convert(tmp_path / "folder", tmp_path / "a.gguf", to="gguf", progress=False)
    with FORMAT.read(tmp_path / "a.gguf") as checkpoint:
        assert same_parts(checkpoint.linear(DOWN), parts_of(want))
        config = {key: value for key, value in checkpoint.config.items() if key != "architectures"}
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    checkpoints.load(model.bfloat16(), tmp_path / "a.gguf", progress=False)
    checkpoints.save(model, tmp_path / "b.gguf", format="gguf", progress=False, tokenizer=None)
    with FORMAT.read(tmp_path / "a.gguf") as a, FORMAT.read(tmp_path / "b.gguf") as b:
        for name, entry in a.entries.items():
            if entry.quantized:
                assert same_parts(a.linear(name), b.linear(name)), name
            else:
                assert torch.equal(a.dense(name).bfloat16(), b.dense(name).bfloat16()), name
    with pytest.raises(ValueError, match=r"found NVFP4 in model\.layers.* use checkpoints\.convert"):
        checkpoints.quantize(tmp_path / "a.gguf", tmp_path / "c", progress=False)


def test_tied_output_is_left_out(tmp_path, tensors):
    with write(tmp_path / "a.gguf", tensors, {**TINY, "tie_word_embeddings": True}) as checkpoint:
        assert checkpoint.config["tie_word_embeddings"] is True
        assert "lm_head.weight" not in checkpoint.entries
    head = {**tensors, "lm_head.weight": quantize(tensors["lm_head.weight"])}
    with write(tmp_path / "b.gguf", head, {**TINY, "tie_word_embeddings": True}) as checkpoint:
        assert checkpoint.config["tie_word_embeddings"] is False  # an NVFP4 output layer of its own
        assert same_parts(checkpoint.linear("lm_head.weight"), parts_of(head["lm_head.weight"]))


# --- what llama.cpp multiplies by no per-tensor scale ----------------------------------------------------------------

QWEN2 = {**TINY, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}


def as_llama_cpp_reads(path):
    """The weights of a GGUF by llama.cpp's names, its own blocks decoded; feed-forward scales of qwen2 left out."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name, tensor in tensors.items():
        if tensor.tensor_type.name == "NVFP4":
            scale = 1.0 if ".ffn_" in name else float(tensors[f"{name.removesuffix('weight')}scale"].data[0])
            yield name, torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type)).double() * scale


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


# --- reading ---------------------------------------------------------------------------------------------------------


def test_wrong_files_raise_an_error(tmp_path, tensors):
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
    checkpoint = FORMAT.read(tmp_path / "a.gguf")
    del checkpoint._tensors["blk.0.attn_q.scale"]
    with pytest.raises(ValueError, match=r"tensor blk\.0\.attn_q\.weight: its scale is missing"):
        checkpoint.linear(Q)


def foreign(path, architecture="llama", **tensors):
    writer = gguf.GGUFWriter(path, architecture)
    for name, data in tensors.items():
        writer.add_tensor(name.replace("__", "."), data)
    finish(writer)


def finish(writer):
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
    finish(writer)
    with FORMAT.read(tmp_path / "b.gguf") as checkpoint:
        got = tensor_of(checkpoint.linear(Q), torch.float32).dequantize()
        assert same_parts(checkpoint.linear(DOWN), parts_of(tensors[DOWN]))
    theirs = torch.from_numpy(gguf.quants.dequantize(mxfp4, gguf.GGMLQuantizationType.MXFP4))
    want = theirs.view(4, 16, 2, 128).transpose(1, 2).reshape(128, 128)  # pairs of a head to its halves
    assert torch.equal(got, want)


def test_foreign_files_raise_an_error(tmp_path):
    foreign(tmp_path / "a.gguf", "bloom", token_embd__weight=np.zeros((4, 8), np.float32))
    message = r"a\.gguf: architecture 'bloom' is not supported: expected gemma2, .*llama, .*qwen3moe"
    with pytest.raises(ValueError, match=message):
        FORMAT.read(tmp_path / "a.gguf")
    foreign(tmp_path / "b.gguf", token_embd__weight=np.zeros((4, 8), np.float32))
    with pytest.raises(ValueError, match=r"b\.gguf: the file has no llama\.block_count"):
        FORMAT.read(tmp_path / "b.gguf")
    foreign(tmp_path / "c.gguf", token_embd__weight=np.zeros((0, 64), np.float32))
    with pytest.raises(ValueError, match=r"c\.gguf: tensor token_embd\.weight: expected rows and columns, found .*0"):
        FORMAT.read(tmp_path / "c.gguf")


def test_strange_tensors_raise_an_error(tmp_path, tensors, monkeypatch):
    usual = TensorNames.in_file
    other = lambda self, name: "blk.0.output.weight" if name == DOWN else usual(self, name)  # noqa: E731
    monkeypatch.setattr(TensorNames, "in_file", other)
    FORMAT.write(InMemory(tensors, TINY), tmp_path / "a.gguf", progress=False, tokenizer=None)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM does not have the tensors blk\.0\.output\.weight"):
        FORMAT.read(tmp_path / "a.gguf")
