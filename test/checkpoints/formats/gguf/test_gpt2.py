"""GPT-2 in GGUF, whose dense weights transformers stores transposed."""

import shutil

import numpy as np
import pytest
import torch
from checkpoints.formats.gguf.test_tokenizer import trained
from helpers.checkpoints import same_parts
from safetensors.torch import load_file, save_file

from nvfp4_tensor import NVFP4Tensor, checkpoints
from nvfp4_tensor.checkpoints.models.opening import open_model, open_tokenizer

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")
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


@pytest.fixture
def published(tmp_path, model):
    """A folder like openai-community/gpt2: of the model without its output layer, with the masks of its attention."""
    shutil.copytree(tmp_path / "dense", tmp_path / "published")
    file = tmp_path / "published/model.safetensors"
    state = {name.removeprefix("transformer."): value for name, value in load_file(file).items()}
    for layer in range(2):
        state[f"h.{layer}.attn.bias"] = torch.ones(64, 64).tril()[None, None]
        state[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(state, file, metadata={"format": "pt"})
    return tmp_path / "published"


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
    for each in (a, folder, b):
        with pytest.raises(ValueError, match=r"wte\.weight is dense: read it by dense\(name\)"):
            each.linear("transformer.wte.weight")
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


@pytest.mark.parametrize("head", [False, True])
def test_a_published_folder_gives_the_file_of_the_model(tmp_path, model, published, head):
    with torch.no_grad():
        assert torch.equal(open_model(published)(IDS).logits, model(IDS).logits)
    options = {"to": "gguf", "tokenizer": None, "quantize_lm_head": head, "progress": False}
    checkpoints.quantize(tmp_path / "dense", tmp_path / "a.gguf", **options)
    checkpoints.quantize(published, tmp_path / "b.gguf", **options)
    with checkpoints.read(tmp_path / "a.gguf") as a, checkpoints.read(tmp_path / "b.gguf") as b:
        assert a.entries == b.entries and sum(entry.quantized for entry in a.entries.values()) == 8 + head
        assert ("lm_head.weight" in a.entries) == head == (not a.config["tie_word_embeddings"])
        for name, entry in a.entries.items():
            same = same_parts(a.linear(name), b.linear(name)) if entry.quantized else a.dense(name).equal(b.dense(name))
            assert same, name


@pytest.mark.parametrize("to", ["modelopt", "gguf"])
def test_a_quantized_output_layer_is_a_copy_of_the_embedding(tmp_path, model, published, to):
    path = tmp_path / ("q.gguf" if to == "gguf" else "q")
    options = {"tokenizer": None} if to == "gguf" else {}
    checkpoints.quantize(published, path, to=to, quantize_lm_head=True, progress=False, **options)
    again = open_model(path)
    with torch.no_grad():
        for name, weight in again.named_parameters():
            own = model.get_parameter("transformer.wte.weight" if name == "lm_head.weight" else name)
            if not isinstance(weight, NVFP4Tensor):
                assert torch.equal(weight, own), name
                continue
            values = weight.dequantize() if name == "lm_head.weight" else weight.dequantize().t()
            assert (values - own).norm() < 0.2 * own.norm(), name
        assert (
            isinstance(again.lm_head.weight, NVFP4Tensor) and again.transformer.wte.weight is not again.lm_head.weight
        )


def test_the_tokenizer_of_a_file_opens(tmp_path, model):
    checkpoints.convert(tmp_path / "dense", tmp_path / "a.gguf", to="gguf", tokenizer=trained(), progress=False)
    text = "the hen and the fox"
    assert open_tokenizer(tmp_path / "a.gguf")(text).input_ids == trained()(text).input_ids


def test_a_model_without_its_own_output_layer_is_refused(tmp_path, model):
    model.config.tie_word_embeddings = False
    model.config.save_pretrained(tmp_path / "dense")
    with pytest.raises(ValueError, match=r"no lm_head\.weight.*save the model with its output layer"):
        checkpoints.convert(tmp_path / "dense", tmp_path / "a.gguf", to="gguf", tokenizer=None, progress=False)
