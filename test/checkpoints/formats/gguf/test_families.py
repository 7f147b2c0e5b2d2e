"""Gemma 2 and 3, Phi-3, SmolLM3, OLMo 2 and Granite in GGUF: names, settings, and llama.cpp's changes of values.

Each file is held against the dense model: by the reader here, and tensor by tensor by the package gguf, which knows
nothing of ours, with llama.cpp's conversions computed in the test.
"""

import numpy as np
import pytest
import torch
from helpers.checkpoints import InMemory, same_parts
from helpers.tiny_models import tiny_model

from nvfp4_tensor import NVFP4Tensor, checkpoints, quantize
from nvfp4_tensor.checkpoints import parts_of
from nvfp4_tensor.checkpoints.formats.gguf.format import FORMAT

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers", minversion="5.21")

FAMILIES = ("Gemma2", "Gemma3", "Phi3", "SmolLM3", "Olmo2", "Granite")
ARCHITECTURES = {
    "Gemma2": gguf.MODEL_ARCH.GEMMA2, "Gemma3": gguf.MODEL_ARCH.GEMMA3, "Phi3": gguf.MODEL_ARCH.PHI3,
    "SmolLM3": gguf.MODEL_ARCH.SMOLLM3, "Olmo2": gguf.MODEL_ARCH.OLMO2, "Granite": gguf.MODEL_ARCH.GRANITE,
}  # fmt: skip
PERMUTED = ("SmolLM3", "Granite")
CHANGES = {"Gemma2": {"query_pre_attn_scalar": 32}, "Gemma3": {"query_pre_attn_scalar": 32}}
PERIODIC = {"Gemma2": {"layer_types": None}, "Gemma3": {"layer_types": None, "num_hidden_layers": 6}}
"""The families' own patterns of sliding layers: the last of two, and of six, has full attention."""


def model_of(family, **changes):
    """A model whose settings llama.cpp supports, in float32, with norms that are not one."""
    settings = {**CHANGES.get(family, {}), **PERIODIC.get(family, {}), **changes}
    model = tiny_model(family, torch.float32, quantized=False, **settings)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=float("Gemma" not in family), std=0.2)
    return model


def tensors_of(model, weights=True):
    """The model's tensors, linears of the layers in NVFP4 with a per-tensor scale of 1 where llama.cpp ignores it."""
    tensors = {}
    for name, t in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        quantizes = weights and "_proj.weight" in name
        tensors[name] = quantize(t, amax=2688.0 if ".mlp." in name else None) if quantizes else t
    return tensors


def config_of(model):
    return model.config.to_dict()


def write(model, path, **options):
    tensors = tensors_of(model)
    FORMAT.write(InMemory(tensors, config_of(model)), path, progress=False, tokenizer=None, **options)
    return tensors


def dense(t):
    return t.dequantize() if isinstance(t, NVFP4Tensor) else t


@pytest.mark.parametrize("family", FAMILIES)
def test_our_reader_returns_every_tensor(tmp_path, family):
    model = model_of(family)
    tensors = write(model, tmp_path / "a.gguf")
    with FORMAT.read(tmp_path / "a.gguf") as checkpoint:
        assert checkpoint.entries.keys() == tensors.keys()
        for name, want in tensors.items():
            if isinstance(want, NVFP4Tensor):
                assert same_parts(checkpoint.linear(name), parts_of(want)), name
            else:  # Gemma's norms lose what 1 + weight does not represent
                torch.testing.assert_close(checkpoint.dense(name), want, rtol=0, atol=2**-23)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_package_gguf_reads_what_llama_cpp_converts(tmp_path, family):
    """Names by its tensor map, values by its dequantizer, after llama.cpp's rules for norms and for rows of q and k."""
    model = model_of(family)
    tensors = write(model, tmp_path / "a.gguf")
    names = gguf.get_tensor_name_map(ARCHITECTURES[family], model.config.num_hidden_layers)
    found = {t.name: t for t in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    matrices = {name: t for name, t in found.items() if not name.endswith(".scale")}
    assert len(matrices) == len(tensors)
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


@pytest.mark.parametrize("family", FAMILIES)
def test_the_configuration_comes_back(tmp_path, family):
    """transformers' model of the configuration that is read has the logits of the original."""
    model = model_of(family)
    write(model, tmp_path / "a.gguf")
    with FORMAT.read(tmp_path / "a.gguf") as checkpoint:
        read = {key: value for key, value in checkpoint.config.items() if key not in ("architectures", "dtype")}
    config = transformers.AutoConfig.for_model(**read)
    config._attn_implementation = model.config._attn_implementation
    again = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    checkpoints.load(again, tmp_path / "a.gguf", progress=False)
    checkpoints.load(model, tmp_path / "a.gguf", progress=False)
    ids = torch.arange(3, 43)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)


REFUSED = {
    "Gemma2": [
        ({"query_pre_attn_scalar": 64}, "query_pre_attn_scalar 32, not 64"),
        ({"layer_types": ["full_attention"] * 4}, "with layer_types"),
        ({"final_logit_softcapping": None}, "attn_logit_softcapping and final_logit_softcapping only"),
        ({"hidden_activation": "silu"}, "hidden_activation gelu_pytorch_tanh, not 'silu'"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings True"),
    ],
    "Gemma3": [
        ({"query_pre_attn_scalar": 256}, "query_pre_attn_scalar 32, not 256"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention False"),
    ],
    "Phi3": [
        ({"head_dim": 64}, "head_dim 32, not 64"),
        ({"hidden_act": "gelu"}, "hidden_act silu, not 'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope scaling of type 'yarn'.*expected default or longrope"),
        (
            {
                "rope_scaling": {"rope_type": "longrope", "long_factor": [1.0] * 3},
                "original_max_position_embeddings": 9,
            },
            "has 3 values of long_factor, expected 8",
        ),
    ],
    "SmolLM3": [
        ({"no_rope_layers": [1, 1, 1, 1]}, r"no_rope_layers \[1, 1, 1, 0\]"),
        ({"use_sliding_window": True}, "use_sliding_window False"),
    ],
    "Olmo2": [
        ({"head_dim": 16}, "head_dim 32, not 16"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings False"),
    ],
    "Granite": [
        ({"residual_multiplier": 0}, "takes residual_multiplier 0 of granite for a missing one"),
        ({"head_dim": 16}, "head_dim 32, not 16"),
    ],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_llama_cpp_computes_otherwise_is_refused(tmp_path, family):
    model = model_of(family)
    for changes, message in REFUSED[family]:
        config = {**config_of(model), **changes}
        if "rope_scaling" in changes:
            config["rope_parameters"] = None
        with pytest.raises(ValueError, match=message):
            FORMAT.write(InMemory(tensors_of(model), config), tmp_path / "a.gguf", progress=False, tokenizer=None)
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("family", "key"), [("Gemma2", "head_dim"), ("Gemma3", "sliding_window"), ("SmolLM3", "rope_theta")]
)
def test_a_setting_with_a_default_of_the_family_must_be_there(tmp_path, family, key):
    """Without it the usual default would be written, and llama.cpp would compute other numbers."""
    model = model_of(family)
    config = config_of(model)
    config["rope_parameters"] = {k: v for k, v in (config["rope_parameters"] or {}).items() if k != key}
    config.pop(key, None)
    with pytest.raises(ValueError, match=f"config.json has no {key}, which llama.cpp needs for {family.lower()}"):
        FORMAT.write(InMemory(tensors_of(model), config), tmp_path / "a.gguf", progress=False, tokenizer=None)


def test_a_bias_that_llama_cpp_does_not_load_is_refused(tmp_path):
    model = model_of("SmolLM3", attention_bias=True)
    with pytest.raises(ValueError, match=r"o_proj\.bias is not a tensor of llama\.cpp's smollm3"):
        write(model, tmp_path / "a.gguf")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_is_quantized_for_llama_cpp(tmp_path, family):
    """checkpoints.quantize chooses a scale of 1 for the weights whose scale llama.cpp ignores."""
    model_of(family).bfloat16().save_pretrained(tmp_path / "dense")
    checkpoints.quantize(tmp_path / "dense", tmp_path / "a.gguf", to="gguf", tokenizer=None, progress=False)
    with FORMAT.read(tmp_path / "a.gguf") as checkpoint:
        names = [name for name, entry in checkpoint.entries.items() if entry.quantized]
        assert len(names) == (6 if family == "Gemma3" else 4) * (4 if family == "Phi3" else 7)
        assert all(checkpoint.per_tensor_scale(name) == 1 for name in names if ".mlp." in name)


def rms(x):
    return x.double().square().mean().sqrt().item()


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
CASES = {family: (family, {}) for family in FAMILIES} | SCALED


@pytest.mark.parametrize("case", SCALED)
def test_rope_scaling_comes_back(tmp_path, case):
    family, changes = CASES[case]
    wide = WIDE | ({"query_pre_attn_scalar": 64} if "Gemma" in family else {})
    model = model_of(family, **wide, **changes)
    write(model, tmp_path / "a.gguf")
    with FORMAT.read(tmp_path / "a.gguf") as checkpoint:
        read = {key: value for key, value in checkpoint.config.items() if key not in ("architectures", "dtype")}
    config = transformers.AutoConfig.for_model(**read)
    config._attn_implementation = model.config._attn_implementation
    again = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for each in (again, model):
        checkpoints.load(each, tmp_path / "a.gguf", progress=False)
    ids = torch.arange(3, 63)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)


def test_the_output_layer_of_gemma_2_is_not_in_its_files(tmp_path):
    model = model_of("Gemma2")
    head = {"lm_head.weight": quantize(model.model.embed_tokens.weight.detach())}
    with pytest.raises(ValueError, match=r"lm_head\.weight is not a tensor of llama\.cpp's gemma2"):
        FORMAT.write(InMemory(tensors_of(model) | head, config_of(model)), tmp_path / "a.gguf", tokenizer=None)


def test_an_older_config_of_gemma_3(tmp_path):
    """config.json as published: both bases of the rotary embedding apart, the pattern as a number."""
    model = model_of("Gemma3")
    old = {key: value for key, value in config_of(model).items() if key not in ("rope_parameters", "layer_types")}
    old |= {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "sliding_window_pattern": 6, "rope_scaling": None}
    FORMAT.write(InMemory(tensors_of(model), old), tmp_path / "a.gguf", progress=False, tokenizer=None)
    with FORMAT.read(tmp_path / "a.gguf") as checkpoint:
        rope = checkpoint.config["rope_parameters"]
        assert (rope["full_attention"]["rope_theta"], rope["sliding_attention"]["rope_theta"]) == (5e5, 2e4)
        assert checkpoint.config["layer_types"] == ["sliding_attention"] * 5 + ["full_attention"]
    with pytest.raises(ValueError, match="sliding_window_pattern 6, not 4"):
        FORMAT.write(
            InMemory(tensors_of(model), old | {"sliding_window_pattern": 4}), tmp_path / "b.gguf", tokenizer=None
        )


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_llama_cpp_computes_the_same_logits(tmp_path, case):
    """Along 60 tokens, past the sliding window: llama.cpp's logits of the dense file, and of NVFP4 within its noise."""
    llama_cpp = pytest.importorskip("llama_cpp")
    family, changes = CASES[case]
    wide = WIDE | ({"query_pre_attn_scalar": 64} if family in CHANGES else {})
    model = model_of(family, **wide, **changes)
    config, tensors = config_of(model), tensors_of(model)
    state = {name: dense(t) for name, t in tensors.items()}
    ids = torch.arange(3, 63)
    for kind, each in ("nvfp4", tensors), ("dense", state):
        FORMAT.write(InMemory(each, config), tmp_path / f"{kind}.gguf", progress=False, tokenizer=None)
    logits = {}
    for kind in ("nvfp4", "dense"):
        runner = llama_cpp.Llama(
            str(tmp_path / f"{kind}.gguf"), n_ctx=128, n_threads=1, n_threads_batch=1, verbose=False, logits_all=True,
            type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32,
        )  # fmt: skip
        runner.eval(ids.tolist())
        logits[kind] = torch.from_numpy(np.array(runner.scores[: len(ids)]))
    model.load_state_dict(state, strict=False)
    with torch.no_grad():
        ours = model(ids[None]).logits[0]
    # GELU is a table in float16 there.
    assert rms(ours - logits["dense"]) < (1e-3 if "Gemma" in family else 1e-5) * rms(ours)
    assert rms(ours - logits["nvfp4"]) < 0.05 * rms(ours)
