from types import SimpleNamespace

import pytest
import torch
from torch import nn

from nvfp4_tensor.quantization import generate_calibration_text
from nvfp4_tensor.quantization.accuracy import self_generated_text

transformers = pytest.importorskip("transformers")


def tiny():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, eos_token_id=3
    )
    return transformers.LlamaForCausalLM(config).eval()


def test_what_a_model_writes():
    model, state = tiny(), torch.get_rng_state()
    batches = generate_calibration_text(model, 50, window=12, seed=7)
    assert [batch.shape for batch in batches] == [(1, 12)] * 5
    assert torch.equal(torch.get_rng_state(), state)
    text = torch.cat(batches)
    assert torch.equal(text, torch.cat(generate_calibration_text(model, 50, window=12, seed=7)))
    assert not torch.equal(text, torch.cat(generate_calibration_text(model, 50, window=12, seed=8)))
    assert len(text.unique()) > 10 and (text[:, 1:] != 3).all(), "no end of text"
    # likelier tokens are written more often
    with torch.no_grad():
        chosen = model(text).logits[:, :-1].log_softmax(-1).gather(-1, text[:, 1:, None]).mean()
    assert chosen > -torch.tensor(40.0).log()


class ChatTokenizer:
    """Characters as tokens; 3 ends a message."""

    chat_template = "..."

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert not tokenize and add_generation_prompt
        return f"U:{messages[0]['content']}EA:"

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        return SimpleNamespace(input_ids=[3 if each == "E" else ord(each) % 31 + 4 for each in text])


def test_conversations(monkeypatch):
    """Half of the windows: the template with a message that the model wrote, of any length, and an answer."""
    monkeypatch.setattr(self_generated_text, "_MESSAGE_TOKENS", 9)
    model, tokenizer = tiny(), ChatTokenizer()
    model.generation_config.eos_token_id = [3, 11]
    text = generate_calibration_text(model, 24 * 64, window=24, seed=7, tokenizer=tokenizer)
    assert torch.equal(torch.cat(text[:32]), torch.cat(generate_calibration_text(model, 24 * 32, window=24, seed=7)))
    assert len(text) == 64 and all(each.shape == (1, 24) for each in text)
    before, after = (tokenizer(each, add_special_tokens=False).input_ids for each in ("U:", "EA:"))
    lengths = set()
    for (window,) in text[32:]:
        ids = window.tolist()
        length = ids.index(3) - 2
        lengths.add(length)
        assert ids[:2] == before and ids[2 + length : 5 + length] == after and 3 not in ids[5 + length :]
        assert 11 not in ids[2:], "neither the message nor the answer has a token that ends it"
    assert lengths <= set(range(10)) and len(lengths) > 3
    answers = torch.cat(text[32:])
    with torch.no_grad():  # padding on the left changes no logits: each token is one of the 4 likeliest
        logits = model(answers).logits[:, 14:-1]
    ranks = (logits > logits.gather(-1, answers[:, 15:, None])).sum(-1)
    assert ranks.max() < 50
    tokenizer.chat_template = None
    assert torch.equal(torch.cat(generate_calibration_text(model, 96, window=24, tokenizer=tokenizer)),
                       torch.cat(generate_calibration_text(model, 96, window=24)))  # fmt: skip


def test_arguments_that_do_not_fit():
    for arguments in ({"tokens": 0}, {"window": 1}):
        with pytest.raises(ValueError, match="tokens must be at least 1 and window at least 2"):
            generate_calibration_text(tiny(), **arguments)
    with pytest.raises(TypeError, match="not a Linear"):
        generate_calibration_text(nn.Linear(2, 2))


def test_a_model_in_training_writes_without_its_dropout():
    model = tiny()
    expected = torch.cat(generate_calibration_text(model, 60, window=20, seed=7))
    model.config.attention_dropout = 0.9
    model.model.layers[0].self_attn.attention_dropout = 0.9
    model.train()
    assert torch.equal(torch.cat(generate_calibration_text(model, 60, window=20, seed=7)), expected)
    assert all(module.training for module in model.modules())
