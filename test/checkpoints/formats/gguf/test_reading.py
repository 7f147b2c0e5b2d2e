"""Reading GGUF files: other types, other programs, truncated files."""

import numpy as np
import pytest
import torch
from helpers.checkpoints import DOWN, TINY, InMemory, Q, same_parts, tiny_tensors
from helpers.checkpoints import write_gguf as write

from nvfp4_tensor.checkpoints import parts_of, tensor_of
from nvfp4_tensor.checkpoints.formats.gguf.format import FORMAT

gguf = pytest.importorskip("gguf")


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


def test_foreign_files_raise_an_error(tmp_path):
    foreign(tmp_path / "a.gguf", "bloom", token_embd__weight=np.zeros((4, 8), np.float32))
    with pytest.raises(
        ValueError, match=r"a\.gguf: architecture 'bloom' is not supported: expected gemma2, .*llama, .*qwen3moe"
    ):
        FORMAT.read(tmp_path / "a.gguf")
    foreign(tmp_path / "b.gguf", token_embd__weight=np.zeros((4, 8), np.float32))
    with pytest.raises(ValueError, match=r"b\.gguf: the file has no llama\.block_count"):
        FORMAT.read(tmp_path / "b.gguf")


def test_strange_tensors_raise_an_error(tmp_path, tensors, monkeypatch):
    from nvfp4_tensor.checkpoints.formats.gguf import format as module

    to_name = module.to_gguf_name
    monkeypatch.setattr(
        module, "to_gguf_name", lambda name, *rest: "blk.0.output.weight" if name == DOWN else to_name(name)
    )
    FORMAT.write(InMemory(tensors, TINY), tmp_path / "a.gguf", progress=False, tokenizer=None)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM does not have the tensors blk\.0\.output\.weight"):
        FORMAT.read(tmp_path / "a.gguf")
