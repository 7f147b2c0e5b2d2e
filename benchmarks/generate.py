"""Measure a compiled model that generates text: prefill and decode in bf16, NVFP4 weight-only and W4A4.

The model is benchmarks/llama.py; benchmarks/speed/generation.py measures what transformers' models reach.

    python -m benchmarks.generate [--device cuda] [--models llama-8b smollm2] [--batch 1] [--prompt 512 4096] [--quick]

llama-8b has the shapes of Llama-3.1-8B and random weights, generated on the device (--layers reduces it); smollm2 is
SmolLM2-135M with its own weights. Each block is compiled (fullgraph=True), and on CUDA a decode step, including the
greedy choice, is one CUDA graph. All linears including the head are quantized; the embedding stays bf16 and is counted
separately.

Columns: tokens per second (of the batch), speedup over bf16, the share of the copy bandwidth at which weights and cache
are read; seconds from a prompt to its first token, launched from Python and, on CUDA, as one graph, which excludes the
speed of the host; bytes of the linears' weights; and the peak memory of prefill and decode.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools

import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.harness import Timing, Variant, at_least
from benchmarks.llama import LLAMA_8B, Llama, random_model, smollm2
from nvfp4_tensor import NVFP4Config, NVFP4WeightOnlyConfig, calibrate
from nvfp4_tensor.sizes import model_size, stored_bytes

MODELS = ("llama-8b", "smollm2")
BASELINE, STATIC = "bf16", "W4A4-static"
RECIPES = {BASELINE: None, "weight-only": NVFP4WeightOnlyConfig(), "W4A4": NVFP4Config(), STATIC: NVFP4Config()}
"""Row -> config. Static activation scales are calibrated on the text read, and save each call the search for amax."""


class Generator:
    """Greedy generation with static shapes: one token buffer, one cache, and on CUDA one graph per step."""

    def __init__(self, model: Llama, prompt: Tensor, count: int) -> None:
        """prompt: int64 (B, T). count: number of tokens that :meth:`generate` adds."""
        self.model, self.prompt, self.count = model, prompt, count
        batch, length = prompt.shape
        self.tokens = torch.nn.functional.pad(prompt, (0, count))
        self.positions = torch.arange(length, device=prompt.device)
        self.position = self.positions.new_full((1,), length)
        self.caches = model.new_caches(batch, length + count)
        self.prefill()
        self.advance = self._capture() if prompt.is_cuda else self.step

    @torch.no_grad()
    def prefill(self) -> None:
        """Run the prompt and choose the first token."""
        logits = self.model(self.prompt, self.positions, self.caches)
        length = self.prompt.shape[1]
        self.tokens[:, length : length + 1] = self.model.choose(logits)
        self.position.fill_(length)

    @torch.no_grad()
    def step(self) -> None:
        """Run the token at ``position`` and choose the next one."""
        token = self.tokens.index_select(1, self.position)
        logits = self.model(token, self.position, self.caches)
        self.position += 1
        self.tokens.index_copy_(1, self.position, self.model.choose(logits))

    def decode(self) -> None:
        """Choose the tokens after the first, in ``count`` - 1 steps."""
        self.position.fill_(self.prompt.shape[1])
        for _ in range(self.count - 1):
            self.advance()

    def generate(self) -> Tensor:
        """Return the prompt followed by ``count`` tokens, (B, T + count)."""
        self.prefill()
        self.decode()
        return self.tokens

    def _capture(self):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.step()  # compiles, and lets libraries take their workspaces
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph.replay


@dataclasses.dataclass
class Row:
    """Results of one recipe; ratios are relative to bf16. Bytes include scales and padding."""

    recipe: str
    tokens_per_second: float
    times: float
    share: float
    first_token: float
    first_token_times: float
    linear_bytes: int
    linear_ratio: float
    embedding_bytes: int
    peak_bytes: int | None
    decode: Timing
    prefill: Timing
    prefill_graph: Timing | None
    prefill_graph_times: float | None

    HEAD = (
        *("", "tokens/s", "x bf16", "of copy", "first token", "x bf16", "in a graph", "x bf16"),
        *("linears", "of bf16", "peak memory"),
    )

    def cells(self) -> list[str]:
        return [
            self.recipe,
            f"{self.tokens_per_second:.4g}",
            f"{self.times:.2f}",
            f"{self.share:.0%}",
            harness.seconds(self.first_token),
            f"{self.first_token_times:.2f}",
            "" if self.prefill_graph is None else harness.seconds(self.prefill_graph.median),
            "" if self.prefill_graph_times is None else f"{self.prefill_graph_times:.2f}",
            f"{self.linear_bytes / 1e9:.3f} GB",
            f"{self.linear_ratio:.3f}",
            "" if self.peak_bytes is None else f"{self.peak_bytes / 1e9:.2f} GB",
        ]


@dataclasses.dataclass(frozen=True)
class Contender:
    """A recipe's generator and its peak memory, including the model."""

    generator: Generator
    peak_bytes: int | None

    @property
    def linear_bytes(self) -> int:
        return sum(stored_bytes(linear.weight) for linear in self.generator.model.linears())

    @property
    def moved(self) -> int:
        """Minimal bytes read in decoding: in each step the linears, and the cache up to the length of the prompt."""
        generator = self.generator
        length, slots = generator.prompt.shape[1], generator.caches[0].shape[2]
        cache = sum(map(stored_bytes, generator.caches)) * length // slots
        return (generator.count - 1) * (self.linear_bytes + cache)


def make_model(name: str, recipe: str, layers: int | None, text_length: int, device: torch.device):
    """Return (model, text (text_length,)) for a recipe, not compiled."""
    static = recipe == STATIC
    config = None if static else RECIPES[recipe]
    torch.manual_seed(0)
    if name == "smollm2":
        model, text = smollm2(config, text_length, device)
    else:
        model = random_model(dataclasses.replace(LLAMA_8B, layers=layers or LLAMA_8B.layers), config, device)
        text = torch.randint(LLAMA_8B.vocab, (text_length,), device=device)
    if static:
        positions = torch.arange(text_length, device=device)
        calibrate(model, [(text[None], positions, model.new_caches(1, text_length))], RECIPES[STATIC], progress=False)
    return model, text


def enter(model: Llama, prompt: Tensor, count: int) -> Contender:
    """Run a model once to compile and capture, then again to measure its memory."""
    if not prompt.is_cuda:
        return Contender(Generator(model, prompt, count), None)
    held = torch.cuda.memory_allocated()
    generator = Generator(model, prompt, count)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    generator.generate()
    torch.cuda.synchronize()
    return Contender(generator, torch.cuda.max_memory_allocated() - held + model_size(model).total)


def race(contenders: dict[str, Contender], device: torch.device, repeats: int) -> tuple[list[Row], float]:
    """Return (rows, copy bandwidth in bytes/s) of all recipes, measured interleaved; the first is the baseline."""
    variants = []
    for recipe, contender in contenders.items():
        generator = contender.generator
        variants += [
            Variant(f"{recipe}, decode", generator.decode, contender.moved, in_graph=False),
            Variant(f"{recipe}, prefill", generator.prefill, in_graph=False),
        ]
        if device.type == "cuda":
            variants.append(Variant(f"{recipe}, prefill in a graph", generator.prefill))
    timings = harness.measure(variants, device, repeats=repeats)
    limit = timings[harness.COPY].bandwidth
    base, *_ = contenders
    rows = []
    base_graph = timings.get(f"{base}, prefill in a graph")
    for recipe, contender in contenders.items():
        decode, prefill, generator = timings[f"{recipe}, decode"], timings[f"{recipe}, prefill"], contender.generator
        graph = timings.get(f"{recipe}, prefill in a graph")
        rows.append(
            Row(
                recipe=recipe,
                tokens_per_second=generator.prompt.shape[0] * (generator.count - 1) / decode.median,
                times=timings[f"{base}, decode"].median / decode.median,
                share=decode.bandwidth / limit,
                first_token=prefill.median,
                first_token_times=timings[f"{base}, prefill"].median / prefill.median,
                linear_bytes=contender.linear_bytes,
                linear_ratio=contender.linear_bytes / contenders[base].linear_bytes,
                embedding_bytes=stored_bytes(generator.model.embedding.weight),
                peak_bytes=contender.peak_bytes,
                decode=decode,
                prefill=prefill,
                prefill_graph=graph,
                prefill_graph_times=base_graph.median / graph.median if base_graph and graph else None,
            )
        )
    return rows, limit


def run_model(report: harness.Report, name: str, arguments: argparse.Namespace, device: torch.device) -> list[dict]:
    """Measure all recipes of one model at every batch and prompt length."""
    models = {}
    for recipe in arguments.recipes:
        models[recipe], text = make_model(name, recipe, arguments.layers, max(arguments.prompt), device)
        if not arguments.eager:
            models[recipe].compile_parts()
    runs = []
    for batch, length in itertools.product(arguments.batch, arguments.prompt):
        prompt = text[:length].repeat(batch, 1)
        contenders = {recipe: enter(model, prompt, arguments.tokens) for recipe, model in models.items()}
        rows, limit = race(contenders, device, arguments.repeats)
        shape = models[BASELINE].shape
        report(
            f"\n{name}, {shape.layers} layers, batch {batch}, {length} tokens read, {arguments.tokens} written; "
            f"median of {arguments.repeats}, copy {limit / 1e9:.0f} GB/s"
        )
        report(harness.table(Row.HEAD, [row.cells() for row in rows]))
        report(f"beside the linears an embedding of {rows[0].embedding_bytes / 1e9:.3f} GB, bf16 in every row")
        content = {"model": name, "shape": dataclasses.asdict(shape), "batch": batch, "prompt": length}
        content |= {"tokens": arguments.tokens, "copy": limit, "rows": [dataclasses.asdict(row) for row in rows]}
        runs.append(content)
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", choices=MODELS, help="default: both on CUDA, smollm2 on a CPU")
    parser.add_argument("--layers", type=at_least(1), help="layers of llama-8b instead of its 32")
    parser.add_argument("--recipes", nargs="+", choices=tuple(RECIPES), default=list(RECIPES), help="bf16 always runs")
    parser.add_argument("--batch", type=at_least(1), nargs="+", default=[1])
    parser.add_argument("--prompt", type=at_least(1), nargs="+", help="lengths (default: 512 and 4096, CPU 128)")
    parser.add_argument("--tokens", type=at_least(2), help="tokens written, the first by prefill (default: 64, CPU 16)")
    parser.add_argument("--repeats", type=at_least(1), help="timed runs of each (default: 9 on CUDA, 3 on a CPU)")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--quick", action="store_true", help="two layers of llama-8b, a prompt of 64, 8 tokens, once")
    parser.add_argument("--out", help="folder of the results (default: benchmarks/results)")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    on_cuda = device.type == "cuda"
    arguments.models = arguments.models or (list(MODELS) if on_cuda else ["smollm2"])
    arguments.prompt = arguments.prompt or ([512, 4096] if on_cuda else [128])
    arguments.tokens = arguments.tokens or (64 if on_cuda else 16)
    arguments.repeats = arguments.repeats or (9 if on_cuda else 3)
    if arguments.quick:
        arguments.layers, arguments.prompt, arguments.tokens, arguments.repeats = 2, [64], 8, 1
    arguments.recipes = [BASELINE, *(recipe for recipe in arguments.recipes if recipe != BASELINE)]
    content, report = harness.record(device, compiled=not arguments.eager, runs=[]), harness.Report()
    where = content["machine"].get("gpu", content["machine"]["processor"])
    report(f"{where}, native: {content['native'][device.type]}")
    for name in arguments.models:
        try:
            content["runs"] += run_model(report, name, arguments, device)
        except (FileNotFoundError, ImportError) as error:
            report(f"\n{name} is left out: {error}")
    harness.save(harness.result_path(device, "generate", arguments.out), content, report.text)


if __name__ == "__main__":
    main()
