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
    writer = Writer(tmp_path / "begins", None, max_new_tokens=1, temperature=0, seed=0, compiled=False)
    ids = writer.tokens([{"role": "user", "content": "the fox"}], raw)
    assert ids.tolist() == [[start, *text]]


pytestmark = pytest.mark.slow


@pytest.mark.exhaustive
def test_a_compiled_model_says_the_same(quantized, monkeypatch, capsys, run):
    """In chat too, where the second question is asked of a model that is compiled already."""
    flags = ["--raw", "--max-new-tokens", 6, "--json"]
    eager, compiled = (run("generate", quantized, "the quick", *flags, *more) for more in ([], ["--compile"]))
    assert compiled["text"] == eager["text"] and compiled["new_tokens"] == eager["new_tokens"]
    answers = []
    for more in ([], ["--compile"]):
        monkeypatch.setattr(sys, "stdin", io.StringIO("the fox\nthe dog\n"))
        assert nvfp4_cli.main(["chat", str(quantized), "--max-new-tokens", "3", "--json", *more]) == 0
        answers.append([json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()])
    assert answers[0] == answers[1] and len(answers[0]) == 2


def test_chat_answers_line_by_line(quantized, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("the fox\nthe dog\n\nnever read\n"))
    assert nvfp4_cli.main(["chat", str(quantized), "--max-new-tokens", "3", "--json"]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [answer["prompt"] for answer in answers] == ["the fox", "the dog"]
    assert answers[1]["prompt_tokens"] > answers[0]["prompt_tokens"] + answers[0]["new_tokens"]
