"""Decoding on a CPU, batch 1: transformers' `generate` beside llama.cpp on the same NVFP4 weights.

    python -m benchmarks.speed.decode_cpu                       # both models, 2 threads
    python -m benchmarks.speed.decode_cpu --models smollm2 --rounds 3

Needs llama-cpp-python, built from source (pip install --no-binary llama-cpp-python llama-cpp-python==0.3.36). Its files
are written by us, with the codes and scales that our model holds. The output layer is in bfloat16, the embedding, or
(`, head`) in NVFP4 as a weight of its own. `x llama.cpp` is beside llama.cpp with the same output layer.

A round lets every contender read a prompt and write so many tokens, in turn; time is from the first token to the last,
and the figure is the median of the rounds. Each file of llama.cpp has a process of its own; `load` says how busy the
machine was with other work: the figure is only as good as that is low.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchao.quantization import quantize_

from benchmarks import harness
from benchmarks.harness import Report, at_least, record, result_path, save, table
from benchmarks.speed.stock_llama import SHAPES, Clock, stock_llama
from nvfp4_cli.demo.model import load_model
from nvfp4_tensor import NVFP4Tensor, NVFP4WeightOnlyConfig, checkpoints
from nvfp4_tensor.generation import decode_natively

MODELS = ("smollm2", "llama-1b", "tiny")
"""The tiny one is for the test of this file."""
PROMPT = 32
CONFIG = NVFP4WeightOnlyConfig(four_over_six=True)

Contender = Callable[[Tensor, int], float]
"""(prompt (T,), count) to the seconds from the first token written to the last."""


# --- ours ------------------------------------------------------------------------------------------------------------


def generate_with(model: nn.Module) -> Contender:
    """transformers' `generate` with a static cache, natively. Models of one `model.model` share what that changes."""
    decode_natively(model)

    def run(prompt: Tensor, count: int) -> float:
        clock = Clock()
        ids = model.generate(
            prompt[None], attention_mask=torch.ones_like(prompt)[None], max_new_tokens=count, do_sample=False,
            cache_implementation="static", stopping_criteria=[clock],
        )  # fmt: skip
        assert clock.first is not None and ids.shape[1] == len(prompt) + count
        return clock.last - clock.first

    return run


# --- llama.cpp -------------------------------------------------------------------------------------------------------


class Llama:
    """A GGUF file in llama.cpp, in a process of its own: beside torch's threads it ended in a segmentation fault."""

    def __init__(self, path: Path, threads: int, length: int) -> None:
        command = [sys.executable, "-m", "benchmarks.speed.llama_cpp_process", str(path), str(threads), str(length)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, prompt: Tensor, count: int) -> float:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps([prompt.tolist(), count]) + "\n")
        self.process.stdin.flush()
        if not (answer := self.process.stdout.readline()):
            raise RuntimeError(f"llama.cpp's process ended: {self.process.wait()}")
        return float(json.loads(answer))

    def close(self) -> None:
        self.process.communicate()  # it ends with its input


# --- the models ------------------------------------------------------------------------------------------------------


def dense_model(name: str) -> tuple[nn.Module, Any]:
    """(a Llama of transformers in bfloat16, its tokenizer or None)."""
    if name == "smollm2":
        return load_model()
    return stock_llama(SHAPES[name], "bf16", torch.device("cpu"), tied=True), None


def with_own_head(model: nn.Module) -> nn.Module:
    """The same model with an output layer in NVFP4; the embedding, which it was, stays dense."""
    from transformers import LlamaForCausalLM

    config = type(model.config)(**{**model.config.to_dict(), "tie_word_embeddings": False})
    with torch.device("meta"):
        other = LlamaForCausalLM(config)
    other.model = model.model
    other.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, device="meta")
    other.lm_head.weight = nn.Parameter(model.lm_head.weight.detach(), requires_grad=False)
    quantize_(other.lm_head, CONFIG, filter_fn=lambda module, _: module is other.lm_head)
    assert isinstance(other.lm_head.weight, NVFP4Tensor)
    other.generation_config = model.generation_config
    return other.eval()


def contenders(name: str, folder: Path) -> Iterator[tuple[str, Any]]:
    """By name: a model of ours, or the path of a GGUF."""
    model, tokenizer = dense_model(name)
    model.generation_config.eos_token_id = None  # of the demo's, too: every run writes as many tokens
    write = {"format": "gguf", "tokenizer": tokenizer, "progress": False, "mismatched_scales": "keep"}
    quantize_(model.model, CONFIG)
    checkpoints.save(model, folder / "nvfp4.gguf", **write)
    own = with_own_head(model)
    checkpoints.save(own, folder / "nvfp4_head.gguf", **write)
    yield "ours, NVFP4", model
    yield "ours, NVFP4, head", own
    yield "llama.cpp, NVFP4", folder / "nvfp4.gguf"
    yield "llama.cpp, NVFP4, head", folder / "nvfp4_head.gguf"


# --- the race --------------------------------------------------------------------------------------------------------


def race(runs: dict[str, Contender], prompt: Tensor, count: int, rounds: int) -> dict[str, list[float]]:
    """Tokens a second of every contender in turn, sorted, but for a first round (it maps its file)."""
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            rates[name].append((count - 1) / run(prompt, count))
    return {name: sorted(each[1:]) for name, each in rates.items()}


def run_model(report: Report, name: str, threads: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """One model: tokens a second of all contenders."""
    torch.set_num_threads(threads)
    length = PROMPT + arguments.tokens
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        things = dict(contenders(name, Path(folder)))
        gc.collect()
        runs: dict[str, Contender] = {
            each: Llama(thing, threads, length) if isinstance(thing, Path) else generate_with(thing)
            for each, thing in things.items()
        }
        prompt = torch.arange(100, 100 + PROMPT)
        load = os.getloadavg()[0]
        try:
            taken = race(runs, prompt, arguments.tokens, arguments.rounds)
        finally:
            for run in runs.values():
                if isinstance(run, Llama):
                    run.close()
    rows = [_row(each, taken[each], taken[same_head(each)]) for each in things]
    report(
        f"\n{name}: {PROMPT} tokens read, {arguments.tokens} written, batch 1, threads: {threads}, median of "
        f"{arguments.rounds}; load before: {load:.1f}"
    )
    report(table(HEAD, [_cells(row) for row in rows]))
    return {"model": name, "threads": threads, "tokens": arguments.tokens, "load": load, "rows": rows}


def same_head(name: str) -> str:
    """Return llama.cpp's name with the same output layer."""
    return f"llama.cpp, {name.split(', ', 1)[1]}"


HEAD = ("", "tokens/s", "quartiles", "x llama.cpp")


def _row(name: str, rates: list[float], base: list[float]) -> dict[str, Any]:
    rate = statistics.median(rates)
    low, _, high = statistics.quantiles(rates, n=4, method="inclusive") if len(rates) > 1 else rates * 3
    ratio = rate / statistics.median(base)
    return {"name": name, "tokens_per_second": rate, "low": low, "high": high, "of_llama": ratio, "rates": rates}


def _cells(row: dict[str, Any]) -> list[str]:
    quartiles = f"{row['low']:.4g} to {row['high']:.4g}"
    return [row["name"], f"{row['tokens_per_second']:.4g}", quartiles, f"{row['of_llama']:.2f}"]


def main() -> None:
    parser = harness.parser(__doc__, device=False)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["smollm2", "llama-1b"])
    parser.add_argument("--threads", type=at_least(1), nargs="+", default=[2])
    parser.add_argument("--tokens", type=at_least(2), default=32, help="tokens written, the first by prefill")
    parser.add_argument("--rounds", type=at_least(1), default=7)
    arguments = parser.parse_args()
    version = importlib.metadata.version("llama_cpp_python")
    device, report = torch.device("cpu"), Report()
    content = record(device, llama_cpp=version, runs=[])
    where = f"{content['machine']['processor']}, native: {content['native']['cpu']}"
    report(f"{where}, llama-cpp-python {version}")
    subject = "_".join(["decode_cpu", *(arguments.models if len(arguments.models) == 1 else [])])
    for name, threads in itertools.product(arguments.models, arguments.threads):
        content["runs"].append(run_model(report, name, threads, arguments))
        save(result_path(device, subject, arguments.out), content, report.text)


if __name__ == "__main__":
    main()
