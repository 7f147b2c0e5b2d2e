"""Compare a mixture of experts with NVFP4 weights against torch's bf16 grouped product.

    python -m benchmarks.experts [--models mixtral deepseek] [--tokens 1 8 64 512 4096] [--skewed]

Each token goes to top-k random experts (with ``--skewed``, all tokens to the same ones); rows are sorted by expert.
Columns: rows of x; experts with rows; time of ``torch._grouped_mm`` in bfloat16 and of ``nvfp4.grouped_linear`` in the
same run, both with offsets on the device; their ratio; the minimal bytes per second of the latter (for experts with
rows) as a share of the copy bandwidth; and TFLOP/s.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.harness import Timing, Variant, seconds
from benchmarks.matmul import Layer


@dataclasses.dataclass(frozen=True)
class Model:
    """One projection of a mixture: experts of N x K, of which each token uses ``top``."""

    experts: int
    top: int
    rows: int
    columns: int


MODELS = {"mixtral": Model(8, 2, 14336, 4096), "deepseek": Model(64, 8, 2048, 7168)}
TOKENS = [1, 8, 64, 512, 4096]


def group_ends(model: Model, tokens: int, skewed: bool, device: torch.device) -> Tensor:
    """Return where each expert's rows end, int32 (E,), for tokens that each use ``top`` different experts."""
    generator = torch.Generator().manual_seed(tokens)
    scores = torch.rand(1 if skewed else tokens, model.experts, generator=generator).expand(tokens, -1)
    taken = scores.topk(model.top).indices.flatten()
    return torch.bincount(taken, minlength=model.experts).cumsum(0).to(torch.int32).to(device)


def variants(model: Model, weights: Layer, tokens: int, offs: Tensor) -> list[Variant]:
    rows = tokens * model.top
    x = torch.randn(rows, model.columns, device=weights.dense.device).bfloat16()
    active = int(torch.diff(offs, prepend=offs.new_zeros(1)).count_nonzero())
    dense_moved = 2 * (active * model.rows * model.columns + rows * (model.rows + model.columns))
    moved = dense_moved - active * model.rows * model.columns * 23 // 16  # 4.5 bits an element instead of 16
    factor = weights.factor.expand(model.experts, 1).contiguous()
    arguments = None, weights.codes, weights.scale, factor, offs, x.dtype
    return [
        Variant(f"bf16 {tokens}", lambda: torch._grouped_mm(x, weights.dense.mT, offs=offs), dense_moved),
        Variant(f"nvfp4 {tokens}", lambda: torch.ops.nvfp4.grouped_linear(x, *arguments), moved),
    ]


def show(report: harness.Report, model: Model, groups: dict[int, Tensor], timings: dict[str, Timing]) -> list[dict]:
    limit = timings[harness.COPY]
    kept, lines = [], []
    for tokens, offs in groups.items():
        bf16, nvfp4 = timings[f"bf16 {tokens}"], timings[f"nvfp4 {tokens}"]
        active = int(torch.diff(offs, prepend=offs.new_zeros(1)).count_nonzero())
        ratio, share = bf16.median / nvfp4.median, nvfp4.bandwidth / limit.bandwidth
        rows = tokens * model.top
        flops = 2.0 * rows * model.rows * model.columns
        times = {"bf16": dataclasses.asdict(bf16), "nvfp4": dataclasses.asdict(nvfp4)}
        kept.append({"tokens": tokens, "rows": rows, "active": active, "ratio": ratio, "share": share, **times})
        cells = [str(tokens), str(rows), str(active), seconds(bf16.median), seconds(nvfp4.median), f"{ratio:.2f}x"]
        lines.append([*cells, f"{share:.0%}", f"{flops / nvfp4.median / 1e12:.3g}"])
    header = ["tokens", "rows", "experts", "bf16", "nvfp4", "times bf16", "of copy", "TFLOP/s"]
    report(harness.table(header, lines))
    return kept


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--shrink", type=int, default=1, help="divide rows and columns by this, for a try")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--skewed", action="store_true", help="all tokens to the same experts")
    parser.add_argument("--repeats", type=int, default=25, help="timed runs of each variant")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    content, report = harness.record(device, repeats=arguments.repeats, runs=[]), harness.Report()
    where = content["machine"].get("gpu", content["machine"]["processor"])
    report(f"{where}, native: {content['native'][device.type]}, median of {arguments.repeats}")
    for name in arguments.models:
        rows, columns = (size // arguments.shrink for size in (MODELS[name].rows, MODELS[name].columns))
        model = dataclasses.replace(MODELS[name], rows=rows, columns=columns)
        weights = Layer.random((model.experts, rows, columns), device)
        groups = {tokens: group_ends(model, tokens, arguments.skewed, device) for tokens in arguments.tokens}
        timed = [v for tokens, offs in groups.items() for v in variants(model, weights, tokens, offs)]
        timings = harness.measure(timed, device, repeats=arguments.repeats)
        copy = timings[harness.COPY].bandwidth / 1e9
        report(f"\n{name}: {model.experts} experts of {rows}x{columns}, top {model.top}, copy {copy:.0f} GB/s")
        kept = show(report, model, groups, timings)
        content["runs"].append({"model": name, **dataclasses.asdict(model), "tokens": kept})
    subject = "experts_skewed" if arguments.skewed else "experts"
    harness.save(harness.result_path(device, subject, arguments.out), content, report.text)


if __name__ == "__main__":
    main()
