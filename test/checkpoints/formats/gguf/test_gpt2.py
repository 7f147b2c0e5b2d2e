"""GPT-2 in GGUF, whose dense weights transformers stores transposed."""

import numpy as np
import pytest
import torch
from helpers.checkpoints import same_parts

from nvfp4_tensor import NVFP4Tensor, checkpoints

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers", minversion="5.21")
SIZES = {
    "vocab_size": 96, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
IDS = torch.arange(3, 43)[None]


@pytest.fixture
def model(tmp_path):
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.2)
    model.save_pretrained(tmp_path / "dense")
    return model


def fresh(path):
    config = {k: v for k, v in checkpoints.read(path).config.items() if k not in ("architectures", "dtype")}
    again = transformers.GPT2LMHeadModel(transformers.AutoConfig.for_model(**config)).eval()
    return checkpoints.load(again, path, progress=False)


def test_dense_names_and_values_are_llama_cpps(tmp_path, model):
    checkpoints.convert(tmp_path / "dense", tmp_path / "a.gguf", to="gguf", tokenizer=None, progress=False)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, 2)
    found = {t.name: t for t in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    state = {n: t for n, t in model.state_dict().items() if n != "lm_head.weight"}
    assert len(found) == len(state)
    for name, want in state.items():
        read = torch.from_numpy(np.array(found[names.get_name(name, (".weight", ".bias"))].data))
        transposed = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
        assert torch.equal(read, want.t() if transposed else want), name
    checkpoints.convert(tmp_path / "a.gguf", tmp_path / "again", to="dense", progress=False)
    with checkpoints.read(tmp_path / "again") as again:
        assert again.entries.keys() == state.keys()
        assert all(torch.equal(again.dense(name), want) for name, want in state.items())
    with torch.no_grad():
        torch.testing.assert_close(fresh(tmp_path / "a.gguf")(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("source", ["dense", "dense.gguf"])
def test_codes_survive_a_round_trip(tmp_path, model, source):
    quiet = {"progress": False}
    checkpoints.convert(tmp_path / "dense", tmp_path / "dense.gguf", to="gguf", tokenizer=None, **quiet)
    checkpoints.quantize(tmp_path / source, tmp_path / "a.gguf", to="gguf", tokenizer=None, **quiet)
    checkpoints.convert(tmp_path / "a.gguf", tmp_path / "folder", to="modelopt", **quiet)
    checkpoints.convert(tmp_path / "folder", tmp_path / "b.gguf", to="gguf", tokenizer=None, **quiet)
    a, folder, b = (checkpoints.read(tmp_path / name) for name in ("a.gguf", "folder", "b.gguf"))
    assert a.entries.keys() == folder.entries.keys() == b.entries.keys()
    names = [name for name, entry in a.entries.items() if entry.quantized]
    assert len(names) == 8
    for name in names:
        assert same_parts(a.linear(name), b.linear(name)) and same_parts(a.linear(name), folder.linear(name))
    again = fresh(tmp_path / "a.gguf")
    weights = {n: w.dequantize() for n, w in again.named_parameters() if isinstance(w, NVFP4Tensor)}
    assert len(weights) == 8
    with torch.no_grad():
        logits = again(IDS).logits
        for name, weight in weights.items():
            model.get_parameter(name).copy_(weight.t())
        torch.testing.assert_close(logits, model(IDS).logits, rtol=1e-4, atol=1e-4)


def test_weights_left_dense_are_transposed_once(tmp_path, model):
    exclude = {"exclude": ["*.c_fc"], "tokenizer": None, "progress": False}
    checkpoints.quantize(tmp_path / "dense", tmp_path / "a.gguf", to="gguf", **exclude)
    again, name = fresh(tmp_path / "a.gguf"), "transformer.h.1.mlp.c_fc.weight"
    assert torch.equal(again.get_parameter(name), model.get_parameter(name))


@pytest.mark.parametrize(
    "change",
    [{"activation_function": "relu"}, {"scale_attn_weights": False}, {"scale_attn_by_inverse_layer_idx": True}],
)
def test_what_llama_cpp_computes_otherwise_is_refused(tmp_path, change):
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES, **change)).save_pretrained(tmp_path / "dense")
    with pytest.raises(ValueError, match=r"llama\.cpp supports gpt2 with"):
        checkpoints.convert(tmp_path / "dense", tmp_path / "a.gguf", to="gguf", tokenizer=None, progress=False)
