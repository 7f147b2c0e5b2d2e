"""Compare our kernels in vLLM with vLLM's own: ``python -m nvfp4_tensor.integrations.vllm.check MODEL``.

The model is served three times, each in a process of its own: by vLLM's kernels (Marlin on compute capability 8.0 to
9.0), by ours with dense activations, which is the same arithmetic, and by ours as the checkpoint says. Printed are the
texts' agreement with the first and the speeds of prompts and of tokens.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

from nvfp4_tensor.integrations.serving import SETTING, Setting

PROMPTS = (
    "The capital of France is",
    "A binary search tree is a data structure in which",
    "def quicksort(values):",
    "Once upon a time, in a village at the foot of a mountain,",
    "The three laws of thermodynamics state that",
    "Dear editor, I am writing to",
    "To bake a loaf of bread, first",
    "In 1969, the first people",
)

RUNS = {"vLLM's own": Setting.OFF, "ours, W4A16": Setting.W4A16, "ours, as the checkpoint": Setting.AS_CHECKPOINT}


@dataclasses.dataclass
class Result:
    """What one process measured.

    Attributes:
        served: how many layers our kernels serve.
        texts: the tokens of each text, prompt and continuation, by greedy search.
        prompts: the number of a text's tokens that are its prompt.
        logprobs: for each text of the first run, the log probability of each token of its continuation.
        chosen: whether each of these tokens is the likeliest one.
        prompt_rate: tokens of prompts a second, of one batch of long prompts.
        one_rate, batch_rate: new tokens a second, for one text and for all at once.
    """

    served: int
    texts: list[list[int]]
    prompts: list[int]
    logprobs: list[list[float]]
    chosen: list[list[bool]]
    prompt_rate: float
    one_rate: float
    batch_rate: float


def agreement(result: Result, first: Result) -> tuple[int, float, float]:
    """Return the number of equal texts and, along those of the first run, the share of tokens that are the likeliest,
    and the mean |difference| of logprobs."""
    ours, theirs = ([each for text in run.logprobs for each in text] for run in (result, first))
    chosen = [each for text in result.chosen for each in text]
    return (
        sum(a == b for a, b in zip(result.texts, first.texts, strict=True)),
        sum(chosen) / max(len(chosen), 1),
        sum(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / max(len(ours), 1),
    )


def report(results: dict[str, Result]) -> str:
    """Return the table of the runs, the first of which is vLLM's own."""
    first = next(iter(results.values()))
    rows = [
        f"{'':24} {'layers':>7} {'same texts':>11} {'likeliest':>10} {'|logprob|':>10} "
        f"{'prompt tok/s':>13} {'1 text tok/s':>13} {f'{len(first.texts)} texts tok/s':>14}"
    ]
    for name, result in results.items():
        same, likeliest, difference = agreement(result, first)
        rows.append(
            f"{name:24} {result.served:7} {same:8}/{len(first.texts):<2} {likeliest:10.1%} "
            f"{difference:10.4f} {result.prompt_rate:13.0f} {result.one_rate:13.1f} {result.batch_rate:14.1f}"
        )
    return "\n".join(rows)


def problems(results: dict[str, Result]) -> list[str]:
    """Return what is wrong with the runs: our kernels did not serve, or W4A16 has other numbers than vLLM's."""
    names = list(results)
    found = []
    if results[names[0]].served:
        found.append(f"{names[0]} used our kernels in {results[names[0]].served} layers: its numbers are not vLLM's")
    for name in names[1:]:
        if not results[name].served:
            found.append(f"{name}: our kernels served no layer. vLLM's log has a line with the reason")
    *_, difference = agreement(results[names[1]], results[names[0]])
    if not difference < 0.05:
        found.append(
            f"{names[1]} differs from vLLM's own kernels by {difference:.3f} in the logarithm of probabilities. Fused "
            "weights with different scales are one reason, for which vLLM logs a warning: then ours are the exact ones"
        )
    return found


def served_layers(model: Any) -> int:
    """Return how many layers of vLLM's model our methods serve."""
    methods = [type(getattr(module, "quant_method", None)).__module__ for module in model.modules()]
    return sum(name.startswith("nvfp4_tensor.") for name in methods)


def measure(model: str, tokens: int, first: Result | None, options: dict[str, Any]) -> Result:
    """Serve the model in this process, and return its numbers.

    first: the first run, whose texts are scored; None for that run itself.
    """
    from vllm import LLM, SamplingParams

    llm = LLM(model, **options)
    served = sum(llm.apply_model(served_layers))
    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    llm.generate(PROMPTS[:1], greedy, use_tqdm=False)  # warm up
    outputs, batch_seconds = _timed(lambda: llm.generate(list(PROMPTS), greedy, use_tqdm=False))
    _, one_seconds = _timed(lambda: llm.generate(PROMPTS[:1], greedy, use_tqdm=False))
    texts = [[*each.prompt_token_ids, *each.outputs[0].token_ids] for each in outputs]
    own = [len(each.prompt_token_ids) for each in outputs]
    along, prompts = (texts, own) if first is None else (first.texts, first.prompts)
    long = [{"prompt_token_ids": [text[i % len(text)] for i in range(512)]} for text in texts]
    once = SamplingParams(temperature=0, max_tokens=1)
    llm.generate(long, once, use_tqdm=False)
    _, prompt_seconds = _timed(lambda: llm.generate(long, once, use_tqdm=False))
    scored = llm.generate(
        [{"prompt_token_ids": text} for text in along],
        SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1),
        use_tqdm=False,
    )
    logprobs, chosen = [], []
    for text, start, output in zip(along, prompts, scored, strict=True):
        entries = [output.prompt_logprobs[i][text[i]] for i in range(start, len(text))]
        logprobs.append([each.logprob for each in entries])
        chosen.append([each.rank == 1 for each in entries])
    return Result(
        served=served,
        texts=texts,
        prompts=own,
        logprobs=logprobs,
        chosen=chosen,
        prompt_rate=512 * len(texts) / prompt_seconds,
        one_rate=tokens / one_seconds,
        batch_rate=tokens * len(texts) / batch_seconds,
    )


def _timed(call: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    return call(), time.perf_counter() - start


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = argparse.ArgumentParser(
        prog="python -m nvfp4_tensor.integrations.vllm.check",
        description="Serve MODEL by vLLM's kernels and by ours, and compare texts and speeds.",
    )
    found.add_argument("model", help="an NVFP4 checkpoint: a folder, or a name on the Hugging Face Hub")
    found.add_argument("--tokens", type=int, default=128, help="new tokens of each text (128)")
    found.add_argument("--max-model-len", type=int, default=2048, help="the longest text that vLLM plans for (2048)")
    found.add_argument("--enforce-eager", action="store_true", help="without torch.compile and CUDA graphs")
    found.add_argument("--tensor-parallel-size", type=int, default=1)
    found.add_argument("--json", type=Path, help="also write all numbers to this file")
    return found


def run(arguments: argparse.Namespace) -> int:
    """Run the three processes; return 0 if nothing is wrong."""
    options = {name: getattr(arguments, name) for name in ("max_model_len", "enforce_eager", "tensor_parallel_size")}
    options["enable_prefix_caching"] = False  # a prompt that is read twice is to be computed twice
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that the model can be asked which layers are ours
    results: dict[str, Result] = {}
    for name, setting in RUNS.items():
        print(f"{name} ({SETTING}={setting.value}) ...", flush=True)
        os.environ[SETTING] = setting.value
        first = next(iter(results.values()), None)
        with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            results[name] = process.submit(measure, arguments.model, arguments.tokens, first, options).result()
    print(report(results))
    if arguments.json:
        arguments.json.write_text(json.dumps({name: dataclasses.asdict(each) for name, each in results.items()}))
    wrong = problems(results)
    for line in wrong:
        print(f"! {line}", file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(run(parser().parse_args()))
