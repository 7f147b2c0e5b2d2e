"""decode_natively: what generate writes, when it steps aside, and what it refuses."""

import pytest
import torch
from torchao.quantization import quantize_

from nvfp4_tensor import NVFP4Config, NVFP4WeightOnlyConfig

transformers = pytest.importorskip("transformers")
from nvfp4_tensor.generation.step import NativeDecoder  # noqa: E402
from nvfp4_tensor.integrations.transformers import decode_natively  # noqa: E402

PROMPT = torch.arange(3, 11)[None]


def tiny(dtype=torch.bfloat16, quantized=True, kind="Llama", **changes):
    sizes = {"vocab_size": 300, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128}
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **heads, "tie_word_embeddings": True, **changes})
    torch.manual_seed(1)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype).eval()
    for parameter in model.parameters():  # as large as those of a trained model: attention is not flat
        torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5) if parameter.dim() > 1 else None
    if quantized:
        quantize_(model.model, NVFP4WeightOnlyConfig())
    model.generation_config.eos_token_id = None
    return model


def logits_of(model, count=20, prompt=PROMPT, **arguments):
    """(tokens, logits (count, V)) of generate."""
    torch.manual_seed(0)
    out = model.generate(
        prompt, max_new_tokens=count, do_sample=False, output_logits=True, return_dict_in_generate=True, **arguments
    )
    return out.sequences, torch.stack(out.logits)[:, 0]


@pytest.fixture
def steps(monkeypatch):
    """The positions of the tokens that the op decoded."""
    seen, op = [], torch.ops.nvfp4.decode_llama
    monkeypatch.setattr(torch.ops.nvfp4, "decode_llama", lambda *args: seen.append(args[6]) or op(*args))
    return seen


def assert_close(a, b):
    torch.testing.assert_close(a.float(), b.float(), rtol=0.05, atol=0.05 * float(b.float().std()))


@pytest.mark.parametrize("kind, changes", [
    ("Llama", {}),
    ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}}),
    ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 5000.0},
               "max_position_embeddings": 16}),
    ("Llama", {"tie_word_embeddings": False, "rms_norm_eps": 1e-2}),
    ("Mistral", {"sliding_window": None}),
], ids=str)  # fmt: skip
def test_writes_what_the_model_writes(kind, changes, steps):
    model = tiny(kind=kind, **changes)
    tokens, logits = logits_of(model, cache_implementation="static")
    assert not steps
    natively, native_logits = logits_of(decode_natively(model))
    assert steps == list(range(8, 27))  # of 20 tokens the prompt gives the first
    same = int((tokens != natively)[0].int().argmax()) - 8 if not torch.equal(tokens, natively) else 20
    assert same >= 3
    assert_close(native_logits[:same], logits[:same])


def test_what_it_leaves_to_transformers(steps):
    model = decode_natively(tiny())
    model(PROMPT)
    logits_of(model, cache_implementation="dynamic")
    logits_of(model, prompt=PROMPT.expand(2, -1))
    mask = torch.ones_like(PROMPT)
    mask[0, :3] = 0
    logits_of(model, attention_mask=mask)
    logits_of(model, output_hidden_states=True)
    assert not steps


def test_a_padded_prompt_gives_what_it_gave():
    model, mask = tiny(), torch.ones_like(PROMPT)
    mask[0, :3] = 0
    expected = logits_of(model, attention_mask=mask, cache_implementation="static")
    for a, b in zip(logits_of(decode_natively(model), attention_mask=mask), expected, strict=True):
        assert torch.equal(a, b)


def test_weights_stay_where_they_are():
    model = tiny()
    before = dict(model.named_parameters())
    decode_natively(model)
    logits_of(model)
    after = dict(model.named_parameters())
    assert len(after) == len(before) and all(after[name] is weight for name, weight in before.items())


def test_undone(steps):
    model = tiny()
    expected = logits_of(model, cache_implementation="static")[1]
    decode_natively(model)
    assert isinstance(model.model.forward, NativeDecoder)
    del model.model.forward, model.lm_head.forward
    model.generation_config.cache_implementation = None
    assert torch.equal(logits_of(model, cache_implementation="static")[1], expected) and not steps


def test_a_weight_replaced_later_is_noticed():
    model = decode_natively(tiny())
    attention = model.model.layers[1].self_attn
    attention.o_proj.weight = torch.nn.Parameter(attention.o_proj.weight.detach().dequantize())
    with pytest.raises(RuntimeError, match="replaced after decode_natively"):
        logits_of(model)


@pytest.mark.parametrize("make, error, message", [
    (lambda: torch.nn.Linear(2, 2), TypeError, "takes a Llama or Mistral"),
    (lambda: tiny(quantized=False), ValueError, "layers.0.self_attn.q_proj is dense"),
    (lambda: tiny(torch.float32), ValueError, "is torch.float32 on cpu"),
    (lambda: tiny(attention_bias=True), ValueError, "q_proj has a bias"),
    (lambda: tiny(hidden_act="gelu"), ValueError, "this model's is gelu"),
    (lambda: tiny(head_dim=16), ValueError, "head_dim is 16"),
    (lambda: quantize_(model := tiny(quantized=False), NVFP4Config(), filter_fn=_is_inner) or model,
     ValueError, "W4A4"),
], ids=["module", "dense", "float32", "bias", "gelu", "head_dim", "w4a4"])  # fmt: skip
def test_what_is_refused(make, error, message):
    model = make()
    with pytest.raises(error, match=message):
        decode_natively(model)
    assert "forward" not in vars(getattr(model, "model", model))


def _is_inner(module, name):
    return isinstance(module, torch.nn.Linear) and "lm_head" not in name
