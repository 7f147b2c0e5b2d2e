"""Families of models in GGUF: names, settings, and llama.cpp's changes of values.

Each file is held against the dense model: by the reader here, and tensor by tensor by the package gguf, which knows
nothing of ours, with llama.cpp's conversions computed in the test.
"""

import numpy as np
import pytest
import torch
from helpers.checkpoints import InMemory, same_parts
from helpers.llama_cpp import llama_cpp_logits, rms
from helpers.tiny_models import tiny_model

from nvfp4_tensor import NVFP4Tensor, QuantizeSpec, checkpoints, quantize
from nvfp4_tensor.checkpoints import parts_of, tensor_of
from nvfp4_tensor.checkpoints.formats.gguf.format import FORMAT

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers", minversion="5.21")

FAMILIES = {
    "Llama": "LLAMA", "Mistral": "LLAMA", "Qwen2": "QWEN2", "Qwen3": "QWEN3", "Gemma2": "GEMMA2", "Gemma3": "GEMMA3",
    "Phi3": "PHI3", "SmolLM3": "SMOLLM3", "Olmo2": "OLMO2", "Granite": "GRANITE",
}  # fmt: skip
"""transformers' names and those of the package gguf."""
PERMUTED = ("Llama", "Mistral", "SmolLM3", "Granite")
CHANGES = {
    "Llama": {"mlp_bias": False}, "Mistral": {"sliding_window": None}, "Qwen2": {"use_sliding_window": False},
    "Gemma2": {"query_pre_attn_scalar": 32, "layer_types": None},
    "Gemma3": {"query_pre_attn_scalar": 32, "layer_types": None, "num_hidden_layers": 6},
}  # fmt: skip
"""To what llama.cpp supports. Of Gemma the own patterns of sliding layers: the last of two, and of six, is full."""


def model_of(family, **changes):
    """A model whose settings llama.cpp supports, in float32, with norms that are not one."""
    model = tiny_model(family, torch.float32, quantized=False, **{**CHANGES.get(family, {}), **changes})
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=float("Gemma" not in family), std=0.2)
    return model


def tensors_of(model):
    """The model's tensors, linears of the layers in NVFP4 with a per-tensor scale of 1 where llama.cpp ignores it."""
    return {
        name: quantize(t, amax=2688.0 if ".mlp." in name else None) if "_proj.weight" in name else t
        for name, t in model.state_dict().items()
        if name != "lm_head.weight" or not model.config.tie_word_embeddings
    }


def write(path, model, config=None, tensors=None):
    tensors = tensors_of(model) if tensors is None else tensors
    config = model.config.to_dict() if config is None else config
    FORMAT.write(InMemory(tensors, config), path, progress=False, tokenizer=None)
    return tensors


def dense(t):
    return t.dequantize() if isinstance(t, NVFP4Tensor) else t


def assert_configuration_comes_back(model, path):
    """transformers' model of the configuration that is read has the logits of the original."""
    with FORMAT.read(path) as checkpoint:
        read = {key: value for key, value in checkpoint.config.items() if key not in ("architectures", "dtype")}
    config = transformers.AutoConfig.for_model(**read)
    config._attn_implementation = model.config._attn_implementation
    again = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for each in (again, model):
        checkpoints.load(each, path, progress=False)
    ids = torch.arange(3, 63)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_is_read_and_written_again(tmp_path, family):
    model = model_of(family)
    tensors = write(tmp_path / "a.gguf", model)
    assert any(name.endswith("q_proj.bias") for name in tensors) == (family in ("Llama", "Qwen2"))
    with FORMAT.read(tmp_path / "a.gguf") as checkpoint:
        assert FORMAT.detect(tmp_path / "a.gguf") and checkpoint.entries.keys() == tensors.keys()
        for name, want in tensors.items():
            assert checkpoint.entries[name].shape == tuple(want.shape)
            if isinstance(want, NVFP4Tensor):
                assert same_parts(checkpoint.linear(name), parts_of(want)), name
            else:  # Gemma's norms lose what 1 + weight does not represent
                torch.testing.assert_close(checkpoint.dense(name), want, rtol=0, atol=2**-23)
        FORMAT.write(checkpoint, tmp_path / "b.gguf", progress=False)
    assert (tmp_path / "b.gguf").read_bytes() == (tmp_path / "a.gguf").read_bytes()
    assert_configuration_comes_back(model, tmp_path / "a.gguf")
    assert_llama_cpp_reads(tmp_path / "a.gguf", family, model, tensors)


def assert_llama_cpp_reads(path, family, model, tensors):
    """Names by the package gguf's map, values by its dequantizer, and llama.cpp's rules for norms, rows of q and k."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[FAMILIES[family]], model.config.num_hidden_layers)
    found = {t.name: t for t in gguf.GGUFReader(path).tensors}
    assert sum(not name.endswith(".scale") for name in found) == len(tensors)
    for name, t in tensors.items():
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        read = gguf.quants.dequantize(found[gguf_name].data, found[gguf_name].tensor_type)
        if isinstance(t, NVFP4Tensor):
            assert found[gguf_name].tensor_type == gguf.GGMLQuantizationType.NVFP4
            scale = found[f"{gguf_name.removesuffix('.weight')}.scale"].data.item()
            assert scale == 1 or ".mlp." not in name
            read = read * np.float32(scale)
        want = dense(t)
        if "Gemma" in family and name.endswith("norm.weight"):
            want = want + 1
        heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
        module = name.split(".")[-2]
        if family in PERMUTED and module in heads:  # llama.cpp's LlamaModel.permute
            want = want.view(heads[module], 2, -1, *want.shape[1:]).transpose(1, 2).reshape(want.shape)
        torch.testing.assert_close(torch.from_numpy(np.array(read)).view(want.shape), want, rtol=1e-6, atol=1e-7)


def test_tensors_that_llama_cpp_does_not_load_are_refused(tmp_path):
    model = model_of("Gemma2")
    head = {"lm_head.weight": quantize(model.model.embed_tokens.weight.detach())}
    with pytest.raises(ValueError, match=r"lm_head\.weight is not a tensor of llama\.cpp's gemma2"):
        write(tmp_path / "a.gguf", model, tensors=tensors_of(model) | head)


@pytest.mark.parametrize(("family", "linears"), [("Qwen2", 4 * 7), ("Gemma3", 6 * 7), ("Phi3", 4 * 4)])
@pytest.mark.parametrize("spec", [None, QuantizeSpec(scale_search=True)], ids=str)
def test_a_folder_is_quantized_for_llama_cpp(tmp_path, family, linears, spec):
    """checkpoints.quantize chooses a scale of 1 for the weights whose scale llama.cpp ignores."""
    model = model_of(family).bfloat16()
    model.save_pretrained(tmp_path / "dense")
    checkpoints.quantize(tmp_path / "dense", tmp_path / "a.gguf", to="gguf", spec=spec, tokenizer=None, progress=False)
    with FORMAT.read(tmp_path / "a.gguf") as checkpoint:
        weights = {n: tensor_of(checkpoint.linear(n)) for n, entry in checkpoint.entries.items() if entry.quantized}
    assert len(weights) == linears
    for name, weight in weights.items():
        assert weight.per_tensor_scale == 1 or ".mlp." not in name
        want = model.get_parameter(name).float()
        assert (weight.dequantize().float() - want).norm() < 0.12 * want.norm()


LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
    "long_factor": [1.0 + i / 4 for i in range(16)], "short_factor": [1.0 + i / 64 for i in range(16)],
}  # fmt: skip
LINEAR = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
SCALED = {
    "Phi3, long": ("Phi3", {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 32}}),
    "Phi3, short": ("Phi3", {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 128},
                             "max_position_embeddings": 512}),
    "Gemma3, linear": ("Gemma3", {"rope_parameters": LINEAR}),
}  # fmt: skip
WIDE = {"hidden_size": 256, "intermediate_size": 320, "head_dim": 64}


def wide_model(case):
    family, changes = CASES[case]
    return model_of(family, **WIDE, **({"query_pre_attn_scalar": 64} if "Gemma" in family else {}), **changes)


CASES = {family: (family, {}) for family in FAMILIES} | SCALED


@pytest.mark.parametrize("case", SCALED)
def test_rope_scaling_comes_back(tmp_path, case):
    model = wide_model(case)
    write(tmp_path / "a.gguf", model)
    assert_configuration_comes_back(model, tmp_path / "a.gguf")


@pytest.mark.parametrize("factor, low, high, original", [(32.0, 1.0, 4.0, 8192), (3.7, 1, 32, 9)])
def test_rope_scaling_of_llama_3(tmp_path, factor, low, high, original):
    rope = {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
        "original_max_position_embeddings": original, "rope_theta": 500000.0,
    }  # fmt: skip
    model = model_of("Llama", rope_parameters=rope)
    write(tmp_path / "a.gguf", model)
    with FORMAT.read(tmp_path / "a.gguf") as checkpoint:
        factors = checkpoint._plain("rope_freqs.weight")
    plain = 500000.0 ** -(torch.arange(0, 32, 2, dtype=torch.float64) / 32)
    assert torch.allclose(model.model.rotary_emb.inv_freq.double(), plain / factors.double(), rtol=1e-6)
    assert original != 8192 or (factors.max() == 32.0 and factors.min() == 1.0)
    assert_configuration_comes_back(model, tmp_path / "a.gguf")


def test_an_older_config_of_gemma_3(tmp_path):
    """config.json as published: both bases of the rotary embedding apart, the pattern as a number."""
    model = model_of("Gemma3")
    old = {k: value for k, value in model.config.to_dict().items() if k not in ("rope_parameters", "layer_types")}
    old |= {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "sliding_window_pattern": 6, "rope_scaling": None}
    write(tmp_path / "a.gguf", model, old)
    with FORMAT.read(tmp_path / "a.gguf") as checkpoint:
        rope = checkpoint.config["rope_parameters"]
        assert (rope["full_attention"]["rope_theta"], rope["sliding_attention"]["rope_theta"]) == (5e5, 2e4)
        assert checkpoint.config["layer_types"] == ["sliding_attention"] * 5 + ["full_attention"]
    with pytest.raises(ValueError, match="sliding_window_pattern 6, not 4"):
        write(tmp_path / "b.gguf", model, old | {"sliding_window_pattern": 4})


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_llama_cpp_computes_the_same_logits(tmp_path, case):
    """Along 60 tokens, past the sliding window: llama.cpp's logits of the dense file, and of NVFP4 within its noise."""
    model = wide_model(case)
    tensors = tensors_of(model)
    state = {name: dense(t) for name, t in tensors.items()}
    ids, theirs = torch.arange(3, 63), {}
    for kind, each in ("nvfp4", tensors), ("dense", state):
        write(tmp_path / f"{kind}.gguf", model, tensors=each)
        theirs[kind] = llama_cpp_logits(tmp_path / f"{kind}.gguf", ids)
    model.load_state_dict(state, strict=False)
    with torch.no_grad():
        ours = model(ids[None]).logits[0]
    # GELU is a table in float16 there.
    assert rms(ours - theirs["dense"]) < (1e-3 if "Gemma" in case else 1e-4) * rms(ours)
    assert rms(ours - theirs["nvfp4"]) < (
        0.05 if FAMILIES.get(case) not in ("LLAMA", "QWEN2", "QWEN3") else 0.15
    ) * rms(ours)
