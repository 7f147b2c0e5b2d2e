"""The comparison of vLLM's kernels with ours: its numbers and its verdict. vLLM's engine does not run here."""

import dataclasses
import json
import os
import sys
from argparse import Namespace
from concurrent import futures

import pytest

from nvfp4_tensor.integrations.vllm import check

FIRST = check.Result(
    served=0, texts=[[1, 2, 3, 4], [5, 6, 7]], prompts=[2, 1], logprobs=[[-0.5, -1.0], [-0.25, -2.0]],
    chosen=[[True, True], [True, True]], prompt_rate=9000, one_rate=100, batch_rate=700,
)  # fmt: skip


def results(**changes):
    fields = {"served": 30, "logprobs": [[-0.51, -1.02], [-0.25, -2.01]], "one_rate": 120.0, **changes}
    ours = dataclasses.replace(FIRST, **fields)
    return dict(zip(check.RUNS, (FIRST, ours, ours), strict=True))


def test_agreement_report_and_verdict():
    runs = results(texts=[[1, 2, 3, 4], [5, 6, 8]], chosen=[[True, False], [True, True]])
    same_texts, likeliest, difference = check.agreement(runs["ours, W4A16"], FIRST)
    assert (same_texts, likeliest) == (1, 0.75) and abs(difference - 0.01) < 1e-9
    table = check.report(runs).splitlines()
    assert len(table) == 4 and all(text in table[2] for text in ("120.0", "1/2", "75.0%", "0.0100"))
    assert check.problems(runs) == []


@pytest.mark.parametrize(
    "first, changes, message",
    [
        ({}, {"served": 0}, "served no layer"),
        ({}, {"logprobs": [[-3.0, -1.0], [-0.25, -2.0]]}, "differs from vLLM's own kernels by 0.625"),
        ({}, {"logprobs": [[float("nan"), -1.0], [-0.25, -2.0]]}, "differs from vLLM's"),
        ({"served": 4}, {}, "its numbers are not vLLM's"),
    ],
)
def test_what_is_wrong_is_said(first, changes, message):
    runs = results(**changes)
    runs["vLLM's own"] = dataclasses.replace(FIRST, **first)
    assert any(message in line for line in check.problems(runs))


class Engine:
    """What the comparison calls of vLLM: texts of two tokens, by kernels of the setting's."""

    def __init__(self, model, **options):
        assert model == "m" and options["max_model_len"] == 2048 and not options["enable_prefix_caching"]
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"

    def apply_model(self, count):
        return [3 * (os.environ[check.SETTING] != "0")]

    def generate(self, prompts, sampling, use_tqdm):
        new = Namespace(token_ids=[7, 8][: sampling.max_tokens])
        scores = [{token: Namespace(logprob=-1.0, rank=1) for token in (3, 4, 7, 8)}] * 4
        return [Namespace(prompt_token_ids=[3, 4], outputs=[new], prompt_logprobs=scores) for _ in prompts]


class InThisProcess(futures.ThreadPoolExecutor):
    def __init__(self, workers, context):
        assert context.get_start_method() == "spawn"
        super().__init__(workers)


def test_the_runs_and_what_they_write(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", Namespace(LLM=Engine, SamplingParams=Namespace))
    monkeypatch.setattr(futures, "ProcessPoolExecutor", InThisProcess)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    arguments = check.parser().parse_args(["m", "--tokens", "2", "--json", str(tmp_path / "out.json")])
    assert check.run(arguments) == 0
    written = json.loads((tmp_path / "out.json").read_text())
    assert [(name, each["served"], each["texts"][0]) for name, each in written.items()] == [
        (name, 3 * bool(i), [3, 4, 7, 8]) for i, name in enumerate(check.RUNS)
    ]
