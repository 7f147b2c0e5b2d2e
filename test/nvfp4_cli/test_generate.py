"""``nvfp4 generate`` and ``chat`` against transformers with the same weights."""

import io
import json
import shutil
import sys

import pytest
import torch

import nvfp4_cli
from nvfp4_cli.generate import Writer
from nvfp4_tensor import checkpoints
from nvfp4_tensor.generation.step import decode_counts


def test_generate_is_transformers_own(quantized, dense, run):
    transformers = pytest.importorskip("transformers")
    said = run("generate", quantized, "the quick", "--raw", "--max-new-tokens", 6, "--json")
    model = transformers.AutoModelForCausalLM.from_pretrained(dense, dtype=torch.bfloat16)
    checkpoints.load(model, quantized, progress=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(dense)
    ids = tokenizer("the quick", return_tensors="pt").input_ids
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
    assert said["text"] == tokenizer.decode(expected, skip_special_tokens=True)
    assert said["new_tokens"] == len(expected)
    writer = Writer(quantized, None, max_new_tokens=6, temperature=0, seed=0)
    assert writer.answer([{"content": "the quick"}], raw=True, stream=False).text == said["text"]
    assert decode_counts(writer.model).native == 5  # all but the prompt's
    out = run("generate", quantized, "the quick", "--raw", "--max-new-tokens", 2)
    assert "the quick" in out and "per second" not in out  # which goes to stderr


@pytest.mark.parametrize("raw", [False, True])
def test_a_prompt_begins_once(dense, tmp_path, raw):
    """Tokenizers of Llama 3, Mistral and Gemma put a token before every text, and so do their chat templates."""
    transformers = pytest.importorskip("transformers")
    processors = pytest.importorskip("tokenizers").processors
    shutil.copytree(dense, tmp_path / "begins")
    tokenizer = transformers.AutoTokenizer.from_pretrained(dense)
    start, text = tokenizer.eos_token_id, tokenizer("the fox", add_special_tokens=False).input_ids
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", start)]
    )
    tokenizer.chat_template = "{{ eos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "begins")
    writer = Writer(tmp_path / "begins", None, max_new_tokens=1, temperature=0, seed=0)
    ids = writer.tokens([{"role": "user", "content": "the fox"}], raw)
    assert ids.tolist() == [[start, *text]]


pytestmark = pytest.mark.slow


def test_chat_answers_line_by_line(quantized, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("the fox\nthe dog\n\nnever read\n"))
    assert nvfp4_cli.main(["chat", str(quantized), "--max-new-tokens", "3", "--json"]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [answer["prompt"] for answer in answers] == ["the fox", "the dog"]
    assert answers[1]["prompt_tokens"] > answers[0]["prompt_tokens"] + answers[0]["new_tokens"]
