"""EleutherAI's lm-evaluation-harness measures a saved folder, and the model itself, as we do. It runs where it is."""

import json

import pytest
import torch
import transformers
from helpers.hub_models import from_pretrained
from torch.nn.functional import cross_entropy

from nvfp4_tensor.testing.model_quality import perplexity

lm_eval = pytest.importorskip("lm_eval", reason="pip install '.[dev, eval-test]'")
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

pytestmark = pytest.mark.slow

CHOICES = ["red", "a blue", "green too"]
QUESTIONS = [{"question": f"{i} and {i + 3} are", "answer": i % 3} for i in range(24)]
TEXT = "the quick brown fox jumps over the lazy dog"
TASKS = {
    "tiny_choice": ("multiple_choice", QUESTIONS, "{{question}}", "answer", "acc", {"doc_to_choice": CHOICES}),
    "tiny_text": ("loglikelihood_rolling", [{"text": TEXT}], "", "{{text}}", "byte_perplexity", {}),
}
"""By name: the kind of output, the rows, the text before and after, the metric, and more."""


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """Write the tasks, with nothing from the hub, and return what the harness needs to find them."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for name, (output, rows, before, after, metric, more) in TASKS.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        task = {
            "task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": str(tmp_path / f"{name}.jsonl")},
            "test_split": "train", "output_type": output, "doc_to_text": before, "doc_to_target": after,
            "metric_list": [{"metric": metric}], **more,
        }  # fmt: skip
        (tmp_path / f"{name}.yaml").write_text(json.dumps(task))
    return {"tasks": list(TASKS), "task_manager": TaskManager(include_path=str(tmp_path), include_defaults=False)}


@pytest.fixture
def tokenizer():
    """One token for each byte, and one before each text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    trained = Tokenizer(models.BPE({letter: i for i, letter in enumerate([*letters, "<eos>"])}, []))
    trained.pre_tokenizer, trained.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=trained, eos_token="<eos>")


@torch.no_grad()
def of_ours(model, tokenizer):
    """Return the accuracy, and the perplexity of a token, which is a byte."""
    right = 0
    for row in QUESTIONS:
        prompt, losses = tokenizer.encode(row["question"]), []
        for choice in CHOICES:
            ids = torch.tensor(prompt + tokenizer.encode(f" {choice}"))
            logits = model(ids[None, :-1]).logits[0, len(prompt) - 1 :].float()
            losses.append(cross_entropy(logits, ids[len(prompt) :], reduction="sum").item())
        right += losses.index(min(losses)) == row["answer"]
    text = torch.tensor([tokenizer.eos_token_id, *tokenizer.encode(TEXT)])
    return right / len(QUESTIONS), perplexity(model, text, len(text))


def test_it_measures_what_we_do(llama, tmp_path, tasks, tokenizer):
    model = from_pretrained(llama(vocab_size=260)[1])
    model.save_pretrained(tmp_path / "nvfp4")
    tokenizer.save_pretrained(tmp_path / "nvfp4")
    accuracy, per_byte = of_ours(model, tokenizer)
    assert 0 < accuracy < 1 and per_byte > 2
    in_memory = HFLM(model, tokenizer=tokenizer, softmax_dtype="float32")
    of_folder = f"pretrained={tmp_path / 'nvfp4'},device=cpu,softmax_dtype=float32"
    for given, arguments in (("hf", of_folder), (in_memory, None)):
        found = lm_eval.simple_evaluate(given, arguments, bootstrap_iters=0, **tasks)["results"]
        assert found["tiny_choice"]["acc,none"] == accuracy
        assert found["tiny_text"]["byte_perplexity,none"] == pytest.approx(per_byte, rel=1e-6)
