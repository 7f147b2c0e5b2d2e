"""Text generation as people launch it: a stock Llama of transformers, dense and in NVFP4, with each way to generate.

    python -m benchmarks.speed.generation                             # Llama-8B's shape, batch 1, 8 and 16
    python -m benchmarks.speed.generation --quick                     # SmolLM2's shape, a few tokens
    python -m benchmarks.speed.generation --ways static --batch 1     # adds these rows to the result file

Weights are random, so that nothing is downloaded. The ways:

    eager    model.generate, 32 tokens
    static   model.generate with a static cache, whose forward transformers compiles on a GPU
    native   decode_natively(model), then model.generate
    stream   decode_natively(model), then nvfp4_tensor.generation.generate(model, ids), a generator of tokens
    graph    not transformers: benchmarks/llama.py, compiled, one CUDA graph per token (the prompt eager); the baseline
             in bfloat16, and how other libraries' weights run (torchao int4, humming)

tokens/s counts the tokens after the first, for the whole batch; "whole call" counts all, and the time of the whole
call, with its prompt. "of copy" is the share of the copy bandwidth at which a step reads the linears and the cache.
"same text" is how many tokens agree with the first way of the table: rounding differs, so texts of random weights part
at a near tie. Runs of all contenders of a batch are interleaved. Rows of an earlier file with the same settings are
kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import harness, peers
from benchmarks.generate import Generator
from benchmarks.harness import at_least
from benchmarks.llama import Llama, Shape, random_model
from benchmarks.speed.stock_llama import (
    SHAPES,
    WEIGHTS,
    bytes_of_a_token,
    cache_bytes,
    random_prompt,
    stock_llama,
    twin,
)
from nvfp4_tensor import NVFP4WeightOnlyConfig
from nvfp4_tensor.generation import decode_natively, generate

BASELINE = "bf16"
WAYS = ("eager", "static", "native", "stream", "graph")
EAGER_TOKENS, WARM_UP = 32, 4
"""Tokens that the slow eager way writes at most, and before it is timed. The other ways compile or capture, and warm up
with the whole text."""


@dataclasses.dataclass(frozen=True)
class Taken:
    """Seconds of a whole call, and from its first token to its last; the text that it wrote, (batch, count)."""

    call: float
    decode: float
    text: Tensor


Run = Callable[[int], Taken]
"""Generate so many tokens."""


@dataclasses.dataclass(frozen=True)
class Contender:
    """Something that generates ``count`` tokens. bytes: what a step reads at least."""

    weights: str
    way: str
    batch: int
    count: int
    run: Run
    bytes: int

    @property
    def name(self) -> str:
        return f"{self.weights}; {self.way}; batch {self.batch}"


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# --- the ways --------------------------------------------------------------------------------------------------------


class Clock:
    """A stopping criterion that never stops and notes when the first token was there."""

    def __init__(self) -> None:
        self.first: float | None = None

    def __call__(self, ids: Tensor, scores: Any, **_: Any) -> Tensor:
        if self.first is None:
            synchronize()
            self.first = time.perf_counter()
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)


def by_transformers(model: Any, prompt: Tensor, **settings: Any) -> Run:
    """Return greedy ``model.generate``."""

    def run(count: int) -> Taken:
        clock = Clock()
        synchronize()
        start = time.perf_counter()
        ids = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, do_sample=False,
            stopping_criteria=[clock], **settings,
        )  # fmt: skip
        synchronize()
        end = time.perf_counter()
        assert clock.first is not None and ids.shape[1] == prompt.shape[1] + count
        return Taken(end - start, end - clock.first, ids[:, prompt.shape[1] :])

    return run


def by_stream(model: Any, prompt: Tensor) -> Run:
    """Return our generator of tokens, timed where its tokens arrive."""

    def run(count: int) -> Taken:
        synchronize()
        marks, tokens = [time.perf_counter()], []
        for token in generate(model, prompt, max_new_tokens=count):
            marks.append(time.perf_counter())
            tokens.append(token)
        assert len(tokens) == count
        return Taken(marks[-1] - marks[0], marks[-1] - marks[1], torch.stack(tokens, dim=1))

    return run


class EagerPrompt(Generator):
    """Compiles nothing for the prompt, which is not what this benchmark is about."""

    def prefill(self) -> None:
        with torch.compiler.set_stance("force_eager"):
            super().prefill()


def in_a_graph(model: Llama, prompt: Tensor, count: int) -> Run:
    """Return the generation of benchmarks/generate.py for exactly ``count`` tokens."""
    generator = EagerPrompt(model, prompt, count)

    def run(_: int) -> Taken:
        synchronize()
        start = time.perf_counter()
        generator.prefill()
        synchronize()
        first = time.perf_counter()
        generator.decode()
        synchronize()
        end = time.perf_counter()
        return Taken(end - start, end - first, generator.tokens[:, prompt.shape[1] :].clone())

    return run


# --- contenders ------------------------------------------------------------------------------------------------------


class Models:
    """Models by their weights, made when first used; the ways that change a model have one of their own."""

    def __init__(self, shape: Shape, device: torch.device, eager: bool) -> None:
        self.shape, self.device, self.eager = shape, device, eager
        self._stock: dict[str, nn.Module] = {}
        self._native: dict[tuple[str, str], nn.Module] = {}
        self._compiled: dict[str, Llama] = {}

    def stock(self, weights: str) -> nn.Module:
        if weights not in self._stock:
            self._stock[weights] = stock_llama(self.shape, weights, self.device)
        return self._stock[weights]

    def native(self, weights: str, way: str) -> nn.Module:
        """Return a model of one way alone, because it keeps the graphs of its last texts."""
        if (weights, way) not in self._native:
            self._native[weights, way] = decode_natively(twin(self.stock(weights)))
        return self._native[weights, way]

    def compiled(self, weights: str) -> Llama:
        """Return our own Llama, compiled (fullgraph=True, but for a peer's operators)."""
        if weights not in self._compiled:
            config = NVFP4WeightOnlyConfig() if weights.startswith("NVFP4") or weights == peers.HUMMING else None
            model = random_model(self.shape, config, self.device)
            if weights == "NVFP4":
                model.head = random_model(dataclasses.replace(self.shape, layers=0), None, self.device).head
            if weights in peers.MODELS:
                peers.convert(model, weights)
            if not self.eager:
                model.compile_parts(fullgraph=weights not in peers.MODELS)
            self._compiled[weights] = model
        return self._compiled[weights]

    def contender(self, weights: str, way: str, batch: int, prompt_length: int, count: int) -> Contender:
        prompt = random_prompt(self.shape, batch, prompt_length, self.device)
        length = prompt_length + count // 2
        if way == "graph":
            model = self.compiled(weights)
            moved = peers.linear_bytes(model)
            moved += cache_bytes(self.shape.layers, self.shape.kv_heads, self.shape.head_dim, length, batch)
            return Contender(weights, way, batch, count, in_a_graph(model, prompt, count), moved)
        makers: dict[str, Callable[[], Run]] = {
            "eager": lambda: by_transformers(self.stock(weights), prompt),
            "static": lambda: by_transformers(self.stock(weights), prompt, cache_implementation="static"),
            "native": lambda: by_transformers(self.native(weights, way), prompt),
            "stream": lambda: by_stream(self.native(weights, way), prompt),
        }
        count = min(count, EAGER_TOKENS) if way == "eager" else count
        moved = bytes_of_a_token(self.stock(weights), length, batch)
        return Contender(weights, way, batch, count, makers[way](), moved)


def contenders(
    models: Models, arguments: argparse.Namespace, batch: int, report: harness.Report, start: float
) -> Iterator[Contender]:
    """Yield what runs, warmed up; report what does not, with the reason. start: of the benchmark, for its budget."""
    for way in arguments.ways:
        weights = [*arguments.weights, *(arguments.peers if way == "graph" else [])]
        for each in weights:
            if time.perf_counter() - start > (arguments.budget or float("inf")):
                report(f"absent: {each}; {way}; batch {batch}: the budget is spent")
                continue
            try:
                found = models.contender(each, way, batch, arguments.prompt, arguments.tokens)
                found.run(WARM_UP if way == "eager" else found.count)
            except Exception as error:  # whatever a way or a peer raises is its reason to be absent
                report(f"absent: {each}; {way}; batch {batch}: {peers.reason(error)}")
            else:
                yield found


# --- measuring -------------------------------------------------------------------------------------------------------


def race(runs: list[Contender], rounds: int, limit: float) -> dict[str, list[Taken]]:
    """Run all contenders in turn; one that has taken more than ``limit`` seconds sits out."""
    taken: dict[str, list[Taken]] = {run.name: [] for run in runs}
    for _ in range(rounds):
        for run in runs:
            if sum(each.call for each in taken[run.name]) < limit:
                taken[run.name].append(run.run(run.count))
    return taken


def agreement(run: Contender, runs: list[Contender], taken: dict[str, list[Taken]]) -> int | None:
    """Return how many tokens of the first row agree with the first way to generate with these weights in this run."""
    if run.way == "graph":  # has other random weights
        return None
    first = next(each for each in runs if each.weights == run.weights and each.way != "graph")
    count = min(run.count, first.count)
    text, expected = (taken[each.name][0].text[0, :count].cpu() for each in (run, first))
    different = (text != expected).nonzero()
    return int(different[0]) if len(different) else count


def row_of(run: Contender, taken: list[Taken], copy: float, same_text: int | None) -> dict[str, Any]:
    rates = [run.batch * (run.count - 1) / each.decode for each in taken]
    rate = statistics.median(rates)
    return {
        "name": run.name, "weights": run.weights, "way": run.way, "batch": run.batch, "tokens": run.count,
        "tokens_per_second": rate, "rates": rates,
        "whole_call": statistics.median(run.batch * run.count / each.call for each in taken),
        "bytes": run.bytes, "copy": copy, "share": rate / run.batch * run.bytes / copy,
        "same_text": same_text, "commit": harness.commit(),
    }  # fmt: skip


def order(row: dict[str, Any]) -> tuple[int, int, int]:
    weights = [*WEIGHTS, *peers.MODELS]
    return row["batch"], WAYS.index(row["way"]), weights.index(row["weights"])


HEAD = ("", "tokens/s", "runs", "whole call", "x bf16, graph", "x bf16, same way", "of copy", "GB/step", "same text")


def cells(row: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """Return one line of the table; speedups are relative to rows of the same batch."""

    def times(way: str) -> str:
        same = [r for r in rows if (r["weights"], r["way"], r["batch"]) == (BASELINE, way, row["batch"])]
        return f"{row['tokens_per_second'] / same[0]['tokens_per_second']:.2f}" if same else ""

    return [
        f"{row['weights']}; {row['way']}", f"{row['tokens_per_second']:.4g}", str(len(row["rates"])),
        f"{row['whole_call']:.4g}", times("graph"), times(row["way"]), f"{row['share']:.0%}",
        f"{row['bytes'] / 1e9:.3f}", "" if row["same_text"] is None else str(row["same_text"]),
    ]  # fmt: skip


def show(report: harness.Report, rows: list[dict[str, Any]], title: str) -> None:
    """Print a table for each batch."""
    for batch in sorted({row["batch"] for row in rows}):
        of_batch = [row for row in rows if row["batch"] == batch]
        copies = sorted({round(row["copy"] / 1e9) for row in of_batch})
        report(f"\n{title}, batch {batch}; copy {' to '.join(map(str, {copies[0]: 0, copies[-1]: 0}))} GB/s")
        report(harness.table(HEAD, [cells(row, of_batch) for row in of_batch]))


def main() -> None:
    arguments = parse()
    device = torch.device(arguments.device)
    shape = SHAPES[arguments.model]
    if arguments.layers:
        shape = dataclasses.replace(shape, layers=arguments.layers)
    settings = {"model": arguments.model, "shape": dataclasses.asdict(shape), "prompt": arguments.prompt,
                "tokens": arguments.tokens}  # fmt: skip
    path = harness.result_path(device, f"generation_{arguments.model}", arguments.out)
    report, models = harness.Report(), Models(shape, device, arguments.eager)
    rows: list[dict[str, Any]] = []
    start = time.perf_counter()
    title = f"{arguments.model}, {shape.layers} layers, {arguments.prompt} tokens read, {arguments.tokens} written"
    for batch in arguments.batch:
        with torch.no_grad():
            copy = harness.measure([], device, repeats=9)[harness.COPY].bandwidth
            runs = list(contenders(models, arguments, batch, report, start))
            taken = race(runs, arguments.rounds, arguments.limit)
        rows += [row_of(run, taken[run.name], copy, agreement(run, runs, taken)) for run in runs]
        content = harness.record(device, **settings)
        content["rows"] = sorted(harness.with_earlier(rows, path, "name", **settings), key=order)
        final = harness.Report(quiet=batch != arguments.batch[-1])
        where = content["machine"].get("gpu", content["machine"]["processor"])
        final(f"{where}, native: {content['native'][device.type]}, {versions(content)}")
        show(final, content["rows"], title)
        final("\n".join(report.lines))
        harness.save(path, content, final.text)


def versions(content: dict[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in content["versions"].items())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_cuda = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if on_cuda else "cpu")
    parser.add_argument("--model", choices=SHAPES, default="llama-8b" if on_cuda else "smollm2")
    parser.add_argument("--layers", type=at_least(1), help="layers instead of the model's")
    parser.add_argument("--weights", nargs="*", choices=WEIGHTS, default=list(WEIGHTS), metavar="WEIGHTS")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--peers", nargs="*", choices=list(peers.MODELS), default=list(peers.MODELS) if on_cuda else [])
    parser.add_argument("--batch", type=at_least(1), nargs="+", default=[1, 8, 16] if on_cuda else [1])
    parser.add_argument("--prompt", type=at_least(1), default=512 if on_cuda else 64, help="tokens read")
    parser.add_argument("--tokens", type=at_least(4), default=128 if on_cuda else 32, help="tokens written")
    parser.add_argument("--rounds", type=at_least(1), default=7)
    parser.add_argument("--limit", type=float, default=5.0, help="seconds after which a slow contender sits out")
    parser.add_argument("--budget", type=float, help="seconds after which no contender is compiled or captured")
    parser.add_argument("--eager", action="store_true", help="do not compile the Llama of the graph")
    parser.add_argument("--quick", action="store_true", help="SmolLM2's shape, batch 1, 16 tokens, one round")
    parser.add_argument("--out", help="folder of the results (default: benchmarks/results)")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.model, arguments.batch, arguments.prompt = "smollm2", [1], 32
        arguments.tokens, arguments.rounds = 16, 1
    return arguments


if __name__ == "__main__":
    main()
