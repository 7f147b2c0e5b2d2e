"""Compare linear layers with NVFP4 weights against torch's bf16 linear, from decode to prefill.

    python -m benchmarks.matmul [--device cuda] [--shapes 14336x8192 28672x8192 4096x4096] [--rows 1 16 64 1024]
    python -m benchmarks.matmul --published --peers --repeats 9
    python -m benchmarks.matmul --gradients --rows 64 512 4096
    python -m benchmarks.matmul --device cpu --threads 2 1 [--sets avx512 avx2]

There are two measurements, one table each, for each number M of rows of x:

    single   one product with a cold cache: the time between two events around it, including its launch.
    chain    R products with R weights in sequence in one CUDA graph, as in a decoder step: the time divided by R. The R
             weights exceed the L2 cache several times, so that no weight is in the cache.

Columns: time of torch's bfloat16 linear and of ``torch.ops.nvfp4.matmul``, their ratio, the minimal bytes per second
(codes, scales, x, y) as a share of the copy bandwidth, and TFLOP/s; W4A4, which is the same product with the activation
quantized and decoded before; and the speedup over bf16 of other installed libraries in the same run with the same
weights. On a CPU --sets names instruction sets, one or more, in place of the machine's best.

--published measures 20 weights of Llama, Qwen, Mixtral and DeepSeek models, of which benchmarks.pages makes one table.
--gradients measures the products of the backward pass of a frozen weight in LoRA: M rows of a gradient (M, N) times w.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks import harness, peers
from benchmarks.harness import Timing, Variant, seconds
from benchmarks.peers import Linear, Weight
from nvfp4_tensor import QuantizeSpec
from nvfp4_tensor.numerics import layout
from nvfp4_tensor.ops import native

SHAPES = {
    "cuda": [(14336, 8192), (28672, 8192), (4096, 4096)],
    "cpu": [(4096, 4096), (576, 576), (192, 576), (1536, 576), (576, 1536)],  # and SmolLM2-135M's layers
}
ROWS = {
    "cuda": [1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096],
    "cpu": [1, 2, 4, 8, 16, 32, 64, 128, 512, 1024],
}
PUBLISHED = [
    *[(4096, 4096), (6144, 4096), (28672, 4096), (14336, 4096), (4096, 14336), (1024, 4096)],  # Llama-3 8B, Mixtral
    *[(8192, 8192), (10240, 8192), (14336, 8192), (8192, 28672), (1024, 8192)],  # Llama-3 70B
    *[(3584, 3584), (512, 3584), (18944, 3584), (3584, 18944)],  # Qwen2 7B
    *[(1536, 7168), (576, 7168), (2048, 7168), (7168, 2048), (24576, 1536)],  # DeepSeek-V3
]
PUBLISHED_ROWS = [1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]
NEAREST = QuantizeSpec().pack()
CHAIN_BYTES = 256 << 20  # of NVFP4 weights, over four times the 60 MB of an H200's L2


@dataclasses.dataclass(frozen=True)
class Layer:
    """One weight in bf16 (N, K), or experts (E, N, K), and, with the same values, in NVFP4."""

    dense: Tensor
    codes: Tensor
    scale: Tensor
    factor: Tensor

    @classmethod
    def random(cls, shape: Sequence[int], device: torch.device, seed: int = 0) -> Layer:
        generator = torch.Generator(device).manual_seed(seed)
        dense = torch.empty(*shape, device=device, dtype=torch.bfloat16).normal_(generator=generator)
        return cls(dense, *torch.ops.nvfp4.quantize(dense, torch.ops.nvfp4.amax(dense, -1), None, NEAREST))

    def product(self, x: Tensor, x_scale: Tensor | None = None, transposed: bool = False) -> Tensor:
        w, columns = (self.codes, self.scale, self.factor), self.dense.shape[1]
        return torch.ops.nvfp4.matmul(x, x_scale, *w, None, columns, transposed, x.dtype)

    def product_of_quantized(self, x: Tensor) -> Tensor:
        """W4A4 without FP4 tensor cores: x is quantized and decoded, and the epilogue applies its per-tensor scale."""
        return self.product(*torch.ops.nvfp4.quantize_activation(x, None, NEAREST, x.dtype))

    def weight(self) -> Weight:
        """The weight in a checkpoint's layout, for the peers."""
        rows, columns = self.dense.shape
        return Weight(self.codes, layout.unswizzle(self.scale, rows, columns // layout.BLOCK), self.factor)

    def moved(self, m: int) -> int:
        """Return the minimal bytes that a product of m rows reads and writes."""
        return self.codes.numel() + self.scale.numel() + 2 * m * sum(self.dense.shape)


def ways(report: harness.Report, layers: list[Layer], xs: list[Tensor], wanted: list[str]) -> dict[str, list[Linear]]:
    """Return the implementations, each a function of x per layer: torch, ours, and the peers that run."""
    makers = {name: peers.PRODUCTS[name] for name in wanted}
    return {
        "bf16": [functools.partial(torch.nn.functional.linear, weight=layer.dense) for layer in layers],
        "nvfp4": [layer.product for layer in layers],
        "w4a4": [layer.product_of_quantized for layer in layers],
        **peers.products(report, makers, [layer.weight() for layer in layers], xs),
    }


def ways_of_sets(layers: list[Layer], sets: list[str]) -> dict[str, list[Linear]]:
    """Return torch's linear, and our product by each instruction set of the CPU."""
    in_use = ""

    def multiply(x: Tensor, layer: Layer, isa: str) -> Tensor:
        nonlocal in_use
        if in_use != isa:  # asking the library would add 9 us to each product
            native.set_instruction_set(isa)
            in_use = isa
        return layer.product(x)

    ours = {isa: [functools.partial(multiply, layer=layer, isa=isa) for layer in layers] for isa in sets}
    return {"bf16": [functools.partial(torch.nn.functional.linear, weight=layer.dense) for layer in layers], **ours}


def ways_backward(layers: list[Layer]) -> dict[str, list[Linear]]:
    return {
        "bf16": [functools.partial(torch.matmul, other=layer.dense) for layer in layers],
        "nvfp4": [functools.partial(layer.product, transposed=True) for layer in layers],
    }


def variants(layers: list[Layer], x: Tensor, products: dict[str, list[Linear]]) -> list[Variant]:
    """Return each implementation's single product "way M" and, for several layers, its chain "way M chain"."""
    layer, m = layers[0], x.shape[0]
    found = []
    for way, linears in products.items():
        moved = 2 * layer.dense.numel() + 2 * m * sum(layer.dense.shape) if way == "bf16" else layer.moved(m)
        found.append(Variant(f"{way} {m}", functools.partial(linears[0], x), moved))
        if len(layers) > 1:
            found.append(Variant(f"{way} {m} chain", functools.partial(chain, linears, x), moved * len(layers)))
    return found


def chain(linears: list[Linear], x: Tensor) -> None:
    for linear in linears:
        linear(x)


def show(
    report: harness.Report, layer: Layer, ways: list[str], rows: list[int], timings: dict[str, Timing], length: int
) -> list[dict]:
    """Print the table of single products (length 1) or chains, and return its record."""
    limit, flops = timings[harness.COPY].bandwidth, 2.0 * layer.dense.numel()
    kept, lines, ours = [], [], ways[1]
    for m in rows:
        suffix = " chain" if length > 1 else ""
        times = {way: timings[f"{way} {m}{suffix}"] for way in ways}
        bf16, nvfp4 = times["bf16"].median / length, times[ours].median / length
        ratios = {way: times["bf16"].median / times[way].median for way in ways if way != "bf16"}
        share = times[ours].bandwidth / limit
        kept.append({"m": m, "ratio": ratios, "share": share, **{w: dataclasses.asdict(t) for w, t in times.items()}})
        line = [str(m), seconds(bf16), seconds(nvfp4), f"{ratios[ours]:.2f}x", f"{share:.0%}"]
        lines.append([*line, f"{flops * m / nvfp4 / 1e12:.3g}", *(f"{ratios[way]:.2f}x" for way in ways[2:])])
    others = [f"{way} x bf16" for way in ways[2:]]
    report("single product" if length == 1 else f"chain of {length} weights, one product")
    report(harness.table(["M", "bf16", ours, f"{ours} x bf16", "of copy", "TFLOP/s", *others], lines))
    return kept


def chain_length(rows: int, columns: int) -> int:
    return math.ceil(CHAIN_BYTES / (rows * columns * 9 / 16))


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--shapes", type=harness.shape, nargs="+", help="N x K of the weights")
    parser.add_argument("--published", action="store_true", help="20 weights of published models")
    parser.add_argument("--gradients", action="store_true", help="gradients (M, N) times w instead")
    parser.add_argument("--rows", type=harness.at_least(1), nargs="+", help="rows of x")
    at_least_1 = harness.at_least(1)
    parser.add_argument("--chain", type=at_least_1, help="weights of a chain (default: 256 MB on CUDA, none on CPU)")
    parser.add_argument("--peers", nargs="*", choices=peers.PRODUCTS, default=list(peers.PRODUCTS), help="default: all")
    parser.add_argument("--threads", type=at_least_1, nargs="+", default=[torch.get_num_threads()], help="of a CPU")
    parser.add_argument("--sets", nargs="+", default=[], help="instruction sets of a CPU")
    parser.add_argument("--repeats", type=at_least_1, default=25, help="timed runs of each variant")
    arguments = parser.parse_args()
    device, repeats = torch.device(arguments.device), arguments.repeats
    content, report = harness.record(device, repeats=repeats, runs=[]), harness.Report()
    where = content["machine"].get("gpu", content["machine"]["processor"])
    report(f"{where}, native: {content['native'][device.type]}, median of {repeats}")
    ms = arguments.rows or (PUBLISHED_ROWS if arguments.published else ROWS[device.type])
    wanted = arguments.peers
    shapes = arguments.shapes or (PUBLISHED if arguments.published else SHAPES[device.type])
    for threads, (rows, columns) in itertools.product(arguments.threads, shapes):
        torch.set_num_threads(threads)
        of_cpu = {"threads": threads} if device.type == "cpu" else {}
        length = arguments.chain or (chain_length(rows, columns) if device.type == "cuda" else 1)
        layers = [Layer.random((rows, columns), device, seed) for seed in range(length)]
        xs = [torch.randn(m, rows if arguments.gradients else columns, device=device).bfloat16() for m in ms]
        report(f"\n{rows}x{columns}" + (f", {threads} threads" if of_cpu else ""))
        if arguments.sets:
            products = ways_of_sets(layers, arguments.sets)
        else:
            products = ways_backward(layers) if arguments.gradients else ways(report, layers, xs, wanted)
            wanted = [peer for peer in wanted if peer in products]
        timings: dict[str, Timing] = {}
        for x in xs:  # each number of rows separately: products of thousands of rows lower the clock for all
            timings |= harness.measure(variants(layers, x, products), device, repeats=repeats)
        report(f"copy {timings[harness.COPY].bandwidth / 1e9:.0f} GB/s")
        run = {"shape": [rows, columns], "chain_length": length, **of_cpu}
        run["single"] = show(report, layers[0], list(products), ms, timings, 1)
        if length > 1:
            run["chain"] = show(report, layers[0], list(products), ms, timings, length)
        content["runs"].append(run)
    if arguments.sets:
        native.set_instruction_set("")
    subject = "matmul" + "_published" * arguments.published + "_gradients" * arguments.gradients
    harness.save(harness.result_path(device, subject, arguments.out), content, report.text)


if __name__ == "__main__":
    main()
