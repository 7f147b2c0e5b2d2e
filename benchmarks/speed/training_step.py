"""One training step of the linears of a Llama-8B block against bfloat16: time, memory, each part against its limit.

    python -m benchmarks.speed.training_step                       # 8,192 tokens on the GPU
    python -m benchmarks.speed.training_step --device cpu          # small linears, 2,048 tokens

A step is forward, dgrad and wgrad of one linear, captured in a CUDA graph (eager on a CPU); "all" is the block's four
linears together. "On end" is one recipe's step again and again, as in training, where the clock is what its own power
makes it; in the other columns the recipes take turns, at one clock for all. Parts are the ops that the recipe is made
of, each with the bytes that it has to move. "saved" is what the linears keep for their backward beside their
parameters, the codes of their weights included; "w again" is nvidia with keep_w=False, which quantizes the weight a
second time instead. "Host time" is that of an eager step of a linear so small that the device does not matter.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchao.quantization import quantize_

from benchmarks import harness
from benchmarks.harness import COPY, Report, Variant, measure, record, result_path, save, seconds, table
from nvfp4_tensor import QuantizeSpec, training

FUSED = {
    "q and o": (4096, 4096),
    "k and v as one": (2048, 4096),
    "gate and up as one": (28672, 4096),
    "down": (4096, 14336),
}
"""The four products that field measurements of this step were taken of."""

SMALL = {"q, k, v and o": (256, 256), "gate and up": (704, 256), "down": (256, 704)}
"""The linears of the smaller model of tutorials/train_llama.py, for a CPU."""

AGAIN = "w again"
RECIPES = {**training.RECIPES, AGAIN: training.RECIPES["nvidia"].replace(name=AGAIN, keep_w=False)}
DEFAULT = ["nvidia", "nvidia_4over6", "unbiased", "accurate", AGAIN]


def step_of(linear: nn.Linear, x: Tensor, dy: Tensor) -> Callable[[], object]:
    """Forward, dgrad and wgrad, gradients overwritten."""

    def run() -> object:
        return torch.autograd.grad(linear(x), (x, linear.weight), dy)

    return run


def linear_by(recipe: str, n: int, k: int, device: torch.device) -> Any:
    """A bfloat16 linear, dense or trained by a recipe."""
    return by_recipe(nn.Linear(k, n, bias=False, device=device, dtype=torch.bfloat16), recipe)


def by_recipe(module: nn.Module, recipe: str) -> nn.Module:
    """Let all linears train by a recipe; for "bf16" none."""
    if recipe != "bf16":
        quantize_(module, training.NVFP4TrainingConfig(RECIPES[recipe]))
    return module


def saved_bytes(linear: nn.Linear, x: Tensor) -> int:
    """What autograd keeps of one call, but for the parameter itself."""
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        if t.data_ptr() != linear.weight.data_ptr():
            kept[t.data_ptr()] = t.numel() * t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        linear(x)
    return sum(kept.values())


def steps(
    shapes: dict[str, tuple[int, int]], recipes: list[str], tokens: int, device: torch.device, repeats: int
) -> dict:
    """Times of each linear's step by each recipe, interleaved with bfloat16's: seconds."""
    results: dict[str, Any] = {}
    for name, (n, k) in shapes.items():
        x = torch.randn(tokens, k, device=device, dtype=torch.bfloat16, requires_grad=True)
        dy = torch.randn(tokens, n, device=device, dtype=torch.bfloat16)
        linears = {recipe: linear_by(recipe, n, k, device) for recipe in ("bf16", *recipes)}
        variants = [Variant(recipe, step_of(linear, x, dy)) for recipe, linear in linears.items()]
        timings = measure(variants, device, repeats=repeats)
        row = {key: timing.median for key, timing in timings.items() if key != COPY and key != "negate"}
        if device.type == "cuda":
            row["on end"] = harness.on_end(variants, device, turn=0.3)
        row["saved"] = {recipe: saved_bytes(linear, x) for recipe, linear in linears.items()}
        row["method"] = timings["bf16"].method
        results[name] = {"n": n, "k": k, **row}
    return results


def parts(n: int, k: int, tokens: int, device: torch.device, repeats: int) -> list[dict]:
    """The ops of NVIDIA's recipe on one linear, each with its least bytes and the share of the copy bandwidth."""
    ops = torch.ops.nvfp4
    nearest, tiles = QuantizeSpec(), QuantizeSpec(block_rows=16)
    stochastic = QuantizeSpec(round_mode="stochastic")
    x_t, dy_t = (spec.replace(hadamard_sign=True) for spec in (nearest, stochastic))
    x = torch.randn(tokens, k, device=device, dtype=torch.bfloat16)
    dy = torch.randn(tokens, n, device=device, dtype=torch.bfloat16)
    w = torch.randn(n, k, device=device, dtype=torch.bfloat16)
    state = torch.tensor([1, 2], device=device)
    a, b, c = x.numel(), dy.numel(), w.numel()
    quarter, both, drawn = 9 / 16, (nearest.pack(), x_t.pack()), (stochastic.pack(), dy_t.pack())
    amax = {key: ops.amax_pair(t, None, *both) for key, t in (("x", x), ("dy", dy))}
    codes = ops.quantize(x, amax["x"][0], None, nearest.pack())
    of_w = ops.quantize(w, None, None, tiles.pack())
    lines: list[tuple[str, Callable[[], object], float]] = [
        ("amax of x and of its transpose", lambda: ops.amax_pair(x, None, *both), 2 * a),
        ("amax of dy and of its transpose", lambda: ops.amax_pair(dy, None, *both), 2 * b),
        ("x and its transpose, to codes", lambda: ops.quantize_pair(x, *amax["x"], None, *both), a * (2 + 2 * quarter)),
        ("dy and its transpose, to codes, stochastic", lambda: ops.quantize_pair(dy, *amax["dy"], state, *drawn),
         b * (2 + 2 * quarter)),
        ("w in 16x16 blocks, amax included", lambda: ops.quantize(w, None, None, tiles.pack()), c * (4 + quarter)),
        ("codes of x to bfloat16", lambda: ops.dequantize(*codes[:2], None, k, torch.bfloat16), a * (2 + quarter)),
        ("bfloat16 product x w^T", lambda: x @ w.t(), 0),
        ("codes of w to those of w^T", lambda: ops.transpose_codes(*of_w[:2]), c * 2 * quarter),
        ("x to values, its transpose to codes", lambda: ops.quantize_pair_values(x, *amax["x"], None, *both, True),
         a * (4 + quarter)),
        ("dy and its transpose to values, stochastic",
         lambda: ops.quantize_pair_values(dy, *amax["dy"], state, *drawn, False), 6 * b),
    ]  # fmt: skip
    variants = [Variant(name, run, int(moved)) for name, run, moved in lines]
    timings = measure(variants, device, repeats=repeats)
    copy = timings[COPY]
    bandwidth = copy.moved / copy.median
    return [
        {
            "part": variant.name,
            "seconds": timings[variant.name].median,
            "share": variant.moved / timings[variant.name].median / bandwidth if variant.moved else None,
        }
        for variant in variants
    ]


class Block(nn.Module):
    """A Llama-8B block without its cache: what a compiled step is measured on."""

    def __init__(self, width: int, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        size = width // heads
        self.heads, self.kv_heads = heads, kv_heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, size * kv_heads, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        q, k, v = (
            linear(y).unflatten(-1, (-1, x.shape[-1] // self.heads)).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(-2))
        y = self.norms[1](x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def block_step(recipe: str, tokens: int, device: torch.device, sizes: tuple[int, int, int, int], repeats: int) -> dict:
    """Time and peak memory of a compiled block, forward and backward."""
    block = by_recipe(Block(*sizes).to(device, torch.bfloat16), recipe)
    compiled = torch.compile(block, fullgraph=True)
    length = min(tokens, 4096)
    x = torch.randn(tokens // length, length, sizes[0], device=device, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)

    def run() -> None:
        compiled(x).backward(dy)

    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
        block.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - held
    else:
        peak = 0
    timing = measure([Variant("step", run, in_graph=False)], device, repeats=repeats)["step"]
    return {"seconds": timing.median, "peak": peak}


def host_times(recipes: list[str], device: torch.device) -> dict[str, float]:
    """Seconds of host time of an eager step of one linear, so small that the device does not matter."""
    x = torch.randn(128, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    steps = {r: step_of(linear_by(r, 64, 64, device), x, dy) for r in ("bf16", *recipes)}
    turns = [{r: harness.host_time(step, device, budget=0.1, rounds=5) for r, step in steps.items()} for _ in range(5)]
    return {r: statistics.median(turn[r] for turn in turns) for r in steps}


def linears_table(results: dict, recipes: list[str]) -> str:
    """A row a linear, and their sums: times of bfloat16's."""
    first = recipes[0]
    header = ["linear", "bf16", *recipes, f"{first} on end"]
    rows = []
    for name, result in results.items():
        rows.append([f"{name} ({result['n']} x {result['k']})", *_ratios([result], recipes)])
    rows.append(["all", *_ratios(list(results.values()), recipes)])
    return table(header, rows)


def _ratios(results: list[dict], recipes: list[str]) -> list[str]:
    total = {key: sum(result[key] for result in results) for key in ("bf16", *recipes)}
    cells = [seconds(total["bf16"]), *(f"{total[recipe] / total['bf16']:.3f}" for recipe in recipes)]
    steady = {key: sum(result.get("on end", {}).get(key, 0) for result in results) for key in ("bf16", recipes[0])}
    return [*cells, f"{steady[recipes[0]] / steady['bf16']:.3f}" if steady["bf16"] else ""]


def saved_table(results: dict, recipes: list[str]) -> str:
    """What the linears together keep for the backward beside their parameters, of what bfloat16's keep: x."""
    total = {key: sum(result["saved"][key] for result in results.values()) for key in ("bf16", *recipes)}
    rows = [[key, f"{total[key] / 2**20:.0f} MiB", f"{total[key] / total['bf16']:.3f}"] for key in total]
    return table(["saved for the backward", "bytes", "of bf16"], rows)


def parts_table(taken: list[dict], n: int, k: int) -> str:
    """Each op of a step, with its share of the copy bandwidth."""
    rows = [
        [row["part"], seconds(row["seconds"]), "" if row["share"] is None else f"{100 * row['share']:.0f} %"]
        for row in taken
    ]
    return table([f"part of {n} x {k}", "time", "of copy"], rows)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--tokens", type=int, help="default: 8,192, on a CPU 2,048")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=DEFAULT)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    device, report = torch.device(options.device), Report()
    on_cpu = device.type == "cpu"
    shapes, sizes = (SMALL, (256, 704, 4, 4)) if on_cpu else (FUSED, (4096, 14336, 32, 8))
    tokens = options.tokens or (2048 if on_cpu else 8192)
    torch.manual_seed(0)
    results = steps(shapes, options.recipes, tokens, device, options.repeats)
    n, k = next(iter(shapes.values()))
    taken = parts(n, k, tokens, device, options.repeats)
    for text in (
        linears_table(results, options.recipes), saved_table(results, options.recipes), parts_table(taken, n, k)
    ):  # fmt: skip
        report(text)
        report("")
    blocks = {}
    for recipe in ("bf16", *options.recipes):
        blocks[recipe] = block_step(recipe, tokens, device, sizes, options.repeats)
        ratio = blocks[recipe]["seconds"] / blocks["bf16"]["seconds"]
        memory = f", peak {blocks[recipe]['peak'] / 2**30:.2f} GiB" if blocks[recipe]["peak"] else ""
        report(f"compiled block, {recipe}: {seconds(blocks[recipe]['seconds'])} ({ratio:.3f} of bf16){memory}")
    host = host_times(options.recipes, device)
    for recipe, taken_by in host.items():
        report(f"host time of a linear, {recipe}: {seconds(taken_by)} ({taken_by / host['bf16']:.2f} of bf16)")
    content = record(device, tokens=tokens, linears=results, parts=taken, blocks=blocks, host=host)
    save(result_path(device, "training_step", options.out), content, report.text)


if __name__ == "__main__":
    main()
