import pytest
import torch
from torch import nn

from nvfp4_tensor.quantization import generate_calibration_text

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
