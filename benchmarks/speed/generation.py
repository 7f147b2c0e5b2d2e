"""Text generation as people launch it: a stock Llama of transformers, dense and in NVFP4, with each way to generate.

    python -m benchmarks.speed.generation                             # Llama-8B's shape, batch 1, 8 and 16
    python -m benchmarks.speed.generation --budget 180                # as much as fits; again: the rest
    python -m benchmarks.speed.generation --prompt 32768 --batch 1 --ways stream codes    # a long context
    python -m benchmarks.speed.generation --layers 16 --prompt 128 --batch 32 128 --ways stream padded    # batches

Weights are random, so that nothing is downloaded. The ways:

    eager    model.generate, 32 tokens
    static   model.generate with a static cache, whose forward transformers compiles on a GPU
    native   decode_natively(model), then model.generate
    stream   decode_natively(model), then nvfp4_tensor.generation.generate(model, ids), a generator of tokens
    padded   the same for prompts of different lengths, 16 tokens and more, with padding before them
    codes    the same as stream with cache=nvfp4_cache(model.config, max_tokens=...), keys and values in NVFP4
    graph    not transformers: benchmarks/llama.py, compiled, one CUDA graph per token (the prompt eager); the baseline
             in bfloat16, and how other libraries' weights run (torchao int4, humming)

tokens/s counts the tokens after the first, for the whole batch; "whole call" counts all, and the time of the whole
call, with its prompt; "first token" is the time to the first one. "of copy" is the share of the copy bandwidth at which
a step reads the linears and the cache.

Contenders run one after the other, those that compile last, and each row is saved when it is measured. Rows of an
earlier file with the same settings are kept, and those of the same commit and machine are not measured again, so that a
run that was cut short is continued by the same command. What cannot run is printed with its reason.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import harness, peers
from benchmarks.harness import at_least
from benchmarks.llama import Generator, Llama, Shape, random_model
from benchmarks.speed.stock_llama import (
    SHAPES,
    WEIGHTS,
    Clock,
    bytes_of_a_token,
    cache_bytes,
    random_prompt,
    stock_llama,
    twin,
)
from nvfp4_tensor import NVFP4WeightOnlyConfig
from nvfp4_tensor.generation import decode_natively, generate, nvfp4_cache

BASELINE = "bf16"
WAYS = ("eager", "static", "native", "stream", "padded", "codes", "graph")
COST = {"native": 0, "stream": 0, "padded": 0, "codes": 0, "eager": 0, "graph": 1, "static": 2}
"""Of setting a way up: the first ones capture, ``graph`` compiles a block, ``static`` the whole model's forward."""
PROMPT = {"cuda": 512, "cpu": 64}
"""Tokens read by default. Results with another number have a file of their own."""
LIMIT = 5.0
"""Seconds after which a slow contender sits out."""
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
    """One row: weights, a way to generate, and how many texts at once."""

    weights: str
    way: str
    batch: int

    @property
    def name(self) -> str:
        return f"{self.weights}; {self.way}; batch {self.batch}"


@dataclasses.dataclass(frozen=True)
class Ready:
    """A contender that is set up: it generates ``count`` tokens, and reads at least so many bytes in a step."""

    run: Run
    count: int
    bytes: int


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


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


def padding(prompt: Tensor) -> Tensor:
    """Return a mask of texts that begin up to 16 tokens before the end, int64 (batch, length)."""
    starts = torch.arange(len(prompt), device=prompt.device) * 37 % max(prompt.shape[1] - 16, 1)
    return (torch.arange(prompt.shape[1], device=prompt.device) >= starts[:, None]).long()


def by_stream(model: Any, prompt: Tensor, cache: Any = None, mask: Tensor | None = None) -> Run:
    """Return our generator of tokens, timed where its tokens arrive. The cache, if any, is emptied before each text."""

    def run(count: int) -> Taken:
        if cache is not None:
            cache.reset()
        synchronize()
        marks, tokens = [time.perf_counter()], []
        for token in generate(model, prompt, max_new_tokens=count, attention_mask=mask, cache=cache, stop_tokens=()):
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
    """Return the generation of benchmarks/llama.py for exactly ``count`` tokens."""
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


class Models:
    """Models by their weights, made when first used; the ways that change a model have one of their own."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.device = shape, device
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
            model.compile_parts(fullgraph=weights not in peers.MODELS)
            self._compiled[weights] = model
        return self._compiled[weights]

    def ready(self, contender: Contender, prompt_length: int, count: int) -> Ready:
        weights, way, batch = contender.weights, contender.way, contender.batch
        prompt = random_prompt(self.shape, batch, prompt_length, self.device)
        length = prompt_length + count // 2
        if way == "graph":
            model = self.compiled(weights)
            moved = peers.linear_bytes(model)
            moved += cache_bytes(self.shape.layers, self.shape.kv_heads, self.shape.head_dim, length, batch)
            return Ready(in_a_graph(model, prompt, count), count, moved)
        makers: dict[str, Callable[[], Run]] = {
            "eager": lambda: by_transformers(self.stock(weights), prompt),
            "static": lambda: by_transformers(self.stock(weights), prompt, cache_implementation="static"),
            "native": lambda: by_transformers(self.native(weights, way), prompt),
            "stream": lambda: by_stream(self.native(weights, way), prompt),
            "padded": lambda: by_stream(self.native(weights, way), prompt, mask=padding(prompt)),
            "codes": lambda: by_stream(
                self.native(weights, way), prompt,
                nvfp4_cache(self.stock(weights).config, max_tokens=prompt_length + count),
            ),
        }  # fmt: skip
        count = min(count, EAGER_TOKENS) if way == "eager" else count
        moved = bytes_of_a_token(self.stock(weights), length, batch, coded=way == "codes")
        return Ready(makers[way](), count, moved)


def contenders(arguments: argparse.Namespace) -> list[Contender]:
    """Return all that were asked for, the quick ones first."""
    found = [
        Contender(each, way, batch)
        for batch in arguments.batch
        for way in arguments.ways
        for each in [*arguments.weights, *(arguments.peers if way == "graph" else [])]
    ]
    return sorted(found, key=lambda each: (each.weights in peers.MODELS, COST[each.way]))


def measure(ready: Ready, rounds: int) -> list[Taken]:
    """Generate ``rounds`` times, or until that has taken the seconds of LIMIT."""
    taken: list[Taken] = []
    while len(taken) < rounds and sum(each.call for each in taken) < LIMIT:
        taken.append(ready.run(ready.count))
    return taken


def row_of(contender: Contender, ready: Ready, taken: list[Taken], copy: float) -> dict[str, Any]:
    batch, count = contender.batch, ready.count
    rates = [batch * (count - 1) / each.decode for each in taken]
    rate = statistics.median(rates)
    return {
        "name": contender.name, **dataclasses.asdict(contender), "tokens": count,
        "tokens_per_second": rate, "rates": rates, "first_token": statistics.median(t.call - t.decode for t in taken),
        "whole_call": statistics.median(batch * count / each.call for each in taken),
        "bytes": ready.bytes, "copy": copy, "share": rate / batch * ready.bytes / copy,
    }  # fmt: skip


def order(row: dict[str, Any]) -> tuple[int, int, int]:
    weights = [*WEIGHTS, *peers.MODELS]
    return row["batch"], WAYS.index(row["way"]), weights.index(row["weights"])


HEAD = ("", "tokens/s", "runs", "whole call", "first token", "x bf16, graph", "x bf16, same way", "of copy", "GB/step")


def cells(row: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """Return one line of the table; speedups are relative to rows of the same batch."""

    def times(way: str) -> str:
        same = [r for r in rows if (r["weights"], r["way"], r["batch"]) == (BASELINE, way, row["batch"])]
        return f"{row['tokens_per_second'] / same[0]['tokens_per_second']:.2f}" if same else ""

    first = f"{1e3 * row['first_token']:.1f} ms" if "first_token" in row else ""
    return [
        f"{row['weights']}; {row['way']}", f"{row['tokens_per_second']:.4g}", str(len(row["rates"])),
        f"{row['whole_call']:.4g}", first, times("graph"), times(row["way"]), f"{row['share']:.0%}",
        f"{row['bytes'] / 1e9:.3f}",
    ]  # fmt: skip


def text_of(record: dict[str, Any], title: str, rows: list[dict[str, Any]]) -> str:
    """Return a table for each batch."""
    machine, versions = record["machine"], ", ".join(f"{name} {each}" for name, each in record["versions"].items())
    found = [f"{machine.get('gpu', machine['processor'])}, native: {record['native'][record['device']]}, {versions}"]
    for batch in sorted({row["batch"] for row in rows}):
        own = [row for row in rows if row["batch"] == batch]
        copies = sorted({round(row["copy"] / 1e9) for row in own})
        found.append(f"\n{title}, batch {batch}; copy {' to '.join(map(str, {copies[0]: 0, copies[-1]: 0}))} GB/s")
        found.append(harness.table(HEAD, [cells(row, own) for row in own]))
    return "\n".join(found)


def main() -> None:
    start = time.perf_counter()
    arguments = parse()
    device = torch.device(arguments.device)
    shape = SHAPES[arguments.model]
    if arguments.layers:
        shape = dataclasses.replace(shape, layers=arguments.layers)
    settings = {"model": arguments.model, "shape": dataclasses.asdict(shape), "prompt": arguments.prompt,
                "tokens": arguments.tokens}  # fmt: skip
    title = f"{arguments.model}, {shape.layers} layers, {arguments.prompt} tokens read, {arguments.tokens} written"
    name = f"generation_{arguments.model}" + ("" if arguments.prompt == PROMPT[device.type] else f"_{arguments.prompt}")
    name += f"_{shape.layers}_layers" if arguments.layers else ""
    path = harness.result_path(device, name, arguments.out)
    record, models = harness.record(device, **settings), Models(shape, device)
    origin = {"commit": record["commit"], "machine": record["machine"]}
    rows = harness.with_earlier(path, [], "name", **settings)
    done = {row["name"] for row in rows if origin.items() <= row.items()}
    wanted = [each for each in contenders(arguments) if each.name not in done]
    copy = harness.measure([], device, repeats=9)[harness.COPY].bandwidth if wanted else 0.0
    for contender in wanted:
        if time.perf_counter() - start > (arguments.budget or float("inf")):
            print(f"not run: {contender.name}: the budget is spent; the same command goes on", flush=True)
            continue
        try:
            with torch.no_grad():
                ready = models.ready(contender, arguments.prompt, arguments.tokens)
                ready.run(WARM_UP if contender.way == "eager" else ready.count)
                taken = measure(ready, arguments.rounds)
        except Exception as error:  # whatever a way or a peer raises is its reason to be absent
            print(f"absent: {contender.name}: {peers.reason(error)}", flush=True)
            continue
        row = row_of(contender, ready, taken, copy) | {"machine": record["machine"]}
        rows = sorted(harness.with_earlier(path, [row], "name", **settings), key=order)
        harness.save(path, record | {"rows": rows}, text_of(record, title, rows))
        print(f"{contender.name}: {row['tokens_per_second']:.4g} tokens/s", flush=True)
        del ready, taken
    print(text_of(record, title, rows))


def parse() -> argparse.Namespace:
    parser = harness.parser(__doc__)
    on_cuda = torch.cuda.is_available()
    parser.add_argument("--model", choices=SHAPES, default="llama-8b" if on_cuda else "smollm2")
    parser.add_argument("--layers", type=at_least(1), help="layers instead of the model's")
    parser.add_argument("--weights", nargs="*", choices=WEIGHTS, default=WEIGHTS[:3], metavar="WEIGHTS")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--peers", nargs="*", choices=list(peers.MODELS), default=list(peers.MODELS) if on_cuda else [])
    parser.add_argument("--batch", type=at_least(1), nargs="+", default=[1, 8, 16] if on_cuda else [1])
    parser.add_argument("--prompt", type=at_least(1), default=PROMPT["cuda" if on_cuda else "cpu"], help="tokens read")
    parser.add_argument("--tokens", type=at_least(4), default=128 if on_cuda else 32, help="tokens written")
    parser.add_argument("--rounds", type=at_least(1), default=7)
    parser.add_argument("--budget", type=float, help="seconds after which no further contender is set up")
    return parser.parse_args()


if __name__ == "__main__":
    main()
