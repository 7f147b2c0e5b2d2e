"""Measure amax, quantize in its modes, dequantize, fake quantize, and quantizing x and its transpose in one pass.

    python -m benchmarks.quantize [--device cuda] [--shapes 16384x16384] [--threads 1 2]

Columns: median time, minimal bytes per second, their share of the copy bandwidth measured in the same run, and the
speedup over each peer: torchao's eager functions, and torch.compile of the reference's arithmetic.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.harness import Timing, Variant, seconds
from benchmarks.peers import Run
from nvfp4_tensor import QuantizeSpec, RoundingMode
from nvfp4_tensor.numerics import layout, reference
from nvfp4_tensor.numerics.layout import BLOCK

NEAREST = QuantizeSpec()
STOCHASTIC = QuantizeSpec(round_mode=RoundingMode.STOCHASTIC)
PEERS = ("torchao", "compiled")


@dataclasses.dataclass(frozen=True)
class Subject:
    """One line of the table: the function to time, its minimal bytes, and the peers' equivalents."""

    name: str
    run: Run
    moved: int
    peers: dict[str, Run] = dataclasses.field(default_factory=dict)


# --- peers -----------------------------------------------------------------------------------------------------------


def reference_quantize(x: Tensor, amax: Tensor, state: Tensor, spec: QuantizeSpec) -> tuple[Tensor, Tensor]:
    """Quantize with the reference's arithmetic without chunks, for torch.compile: x (M, K), K a multiple of 16."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    bits = reference.block_scales(blocks, amax, spec)
    enc = reference.block_encode(bits.view(torch.float8_e4m3fn).float(), reference.encode_scale(amax, spec))
    r16 = reference.random16(*x.shape, state).view(blocks.shape) if spec.is_stochastic else None
    codes = reference.round_e2m1(blocks * enc.unsqueeze(-1), spec.round_mode, r16, spec.random_bits)
    return layout.pack(codes.flatten(-2)), layout.swizzle(bits)


def reference_amax(x: Tensor) -> Tensor:
    """Compute reference.amax without chunks, which torch.compile would unroll: 2,048 of them at 16384^2."""
    magnitude = x.float().abs()
    return torch.where(magnitude <= layout.FLOAT32_MAX, magnitude, 0.0).amax()


def compiled_peers(x: Tensor, amax: Tensor, state: Tensor, packed: tuple[Tensor, ...]) -> dict[str, Run]:
    """Return torch.compile of the reference for each subject."""
    quantize = torch.compile(reference_quantize, dynamic=False)
    decode = torch.compile(reference.dequantize, dynamic=False)
    specs = {
        "quantize, nearest": NEAREST,
        "quantize, stochastic": STOCHASTIC,
        "quantize, nearest, 16x16": NEAREST.replace(block_rows=16),
    }
    amax_of = torch.compile(reference_amax, dynamic=False)
    return {
        "amax": lambda: amax_of(x),
        "dequantize": lambda: decode(*packed, x.shape[1], x.dtype),
        **{name: (lambda spec=spec: quantize(x, amax, state, spec)) for name, spec in specs.items()},
    }


def torchao_peers(x: Tensor) -> dict[str, Run]:
    """Return torchao's eager functions, as its NVFP4Tensor calls them on devices other than Blackwell."""
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, nvfp4_quantize, per_tensor_amax_to_scale

    scale = per_tensor_amax_to_scale(x.abs().max())
    weight = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale)

    def quantize_with_amax() -> object:
        return nvfp4_quantize(x, BLOCK, per_tensor_amax_to_scale(x.abs().max()))

    return {
        "amax": lambda: x.abs().max(),
        "quantize, nearest": lambda: nvfp4_quantize(x, BLOCK, scale),
        "amax + quantize, nearest": quantize_with_amax,
        "amax + quantize, search (mse)": quantize_with_amax,  # its one way of making scales
        "amax + quantize, EDEN": quantize_with_amax,
        "dequantize": lambda: weight.dequantize(x.dtype),
    }


# --- subjects --------------------------------------------------------------------------------------------------------


def subjects(x: Tensor, state: Tensor, peers: dict[str, dict[str, Run]]) -> list[Subject]:
    """Return the subjects for x (M, K), with those of each peer by name.

    Bytes are read once per pass and written; NVFP4 has 9/16 bytes per element.
    """
    nvfp4 = torch.ops.nvfp4
    columns, dense, small = x.shape[1], x.numel() * x.element_size(), x.numel() * 9 // 16
    amax = nvfp4.amax(x, -1)
    hadamard = STOCHASTIC.replace(hadamard_sign=True)
    both = None, NEAREST.pack(), hadamard.pack()
    amax_t = nvfp4.amax_pair(x, *both)[1]
    packed = nvfp4.quantize(x, amax, state, NEAREST.pack())

    def quantize(spec: QuantizeSpec, given: Tensor | None = amax) -> Run:
        return functools.partial(nvfp4.quantize, x, given, state, spec.pack())

    def fake(spec: QuantizeSpec) -> Run:
        return functools.partial(nvfp4.fake_quantize, x, amax, state, spec.pack(), x.dtype)

    def pair(spec_t: QuantizeSpec, amax_of_transpose: Tensor) -> Run:
        return functools.partial(
            nvfp4.quantize_pair, x, amax, amax_of_transpose, state, STOCHASTIC.pack(), spec_t.pack()
        )

    def pair_values(spec: QuantizeSpec, spec_t: QuantizeSpec, codes_t: bool) -> Run:
        return functools.partial(
            nvfp4.quantize_pair_values, x, amax, amax_t, state, spec.pack(), spec_t.pack(), codes_t
        )

    plain_hadamard = NEAREST.replace(hadamard_sign=True)
    search, eden = NEAREST.replace(scale_search="mse"), QuantizeSpec(round_mode="eden")
    lines: list[tuple[str, Run, int]] = [
        ("amax", lambda: nvfp4.amax(x, -1), dense),
        ("quantize, nearest", quantize(NEAREST), dense + small),
        ("quantize, stochastic", quantize(STOCHASTIC), dense + small),
        ("quantize, stochastic, 8 bits", quantize(STOCHASTIC.replace(random_bits=8)), dense + small),
        ("quantize, nearest, scales up", quantize(NEAREST.replace(scale_rounding="up")), dense + small),
        ("quantize, nearest, 16x16", quantize(NEAREST.replace(block_rows=16)), dense + small),
        ("quantize, stochastic, 16x16", quantize(STOCHASTIC.replace(block_rows=16)), dense + small),
        ("quantize, four-over-six (mse)", quantize(NEAREST.replace(four_over_six="mse")), dense + small),
        ("quantize, four-over-six (mae)", quantize(NEAREST.replace(four_over_six="mae")), dense + small),
        ("amax + quantize, nearest", quantize(NEAREST, None), 2 * dense + small),
        ("amax + quantize, stochastic", quantize(STOCHASTIC, None), 2 * dense + small),
        ("amax + quantize, search (mse)", quantize(search, None), 2 * dense + small),
        ("amax + quantize, EDEN", quantize(eden, None), 2 * dense + small),
        ("dequantize", lambda: nvfp4.dequantize(*packed, columns, x.dtype), dense + small),
        ("fake quantize, nearest", fake(NEAREST), 2 * dense),
        ("fake quantize, stochastic", fake(STOCHASTIC), 2 * dense),
        ("amax of row and transpose, Hadamard", lambda: nvfp4.amax_pair(x, *both), dense),
        ("row and transpose, stochastic", pair(STOCHASTIC, amax), dense + 2 * small),
        ("row and transpose, Hadamard, stochastic", pair(hadamard, amax_t), dense + 2 * small),
        ("values and codes of transpose, Hadamard", pair_values(NEAREST, plain_hadamard, True), 2 * dense + small),
        ("values of both, Hadamard, stochastic", pair_values(STOCHASTIC, hadamard, False), 3 * dense),
        ("quantize, search (mse)", quantize(search), dense + small),
        ("quantize, search (mse), 16x16", quantize(search.replace(block_rows=16)), dense + small),
        ("quantize, search (mse), stochastic", quantize(search.replace(round_mode="stochastic")), dense + small),
        ("amax of the rotation (EDEN)", lambda: nvfp4.amax_rotated(x, state), dense),
        ("quantize, EDEN", quantize(eden), dense + small),
    ]
    return [
        Subject(name, run, moved, {peer: runs[name] for peer, runs in peers.items() if name in runs})
        for name, run, moved in lines
    ]


def show(report: harness.Report, items: list[Subject], timings: dict[str, Timing], peers: Sequence[str]) -> list[dict]:
    limit = timings[harness.COPY]
    report(f"copy: {seconds(limit.median)}, {limit.bandwidth / 1e9:.0f} GB/s")
    kept, rows = [], []
    for item in items:
        timing = timings[item.name]
        times = {peer: timings[f"{item.name} / {peer}"].median / timing.median for peer in peers if peer in item.peers}
        share = timing.bandwidth / limit.bandwidth
        kept.append({**dataclasses.asdict(timing), "bandwidth": timing.bandwidth, "share": share, "times": times})
        peer_times = [f"{times[peer]:.1f}x" if peer in times else "" for peer in peers]
        moved = f"{timing.bandwidth / 1e9:.3g} GB/s"
        rows.append([item.name, seconds(timing.median), moved, f"{share:.0%}", *peer_times])
    report(harness.table(["", "time", "moved", "of copy", *peers], rows))
    for suffix in ("", ", 16x16"):
        nearest, stochastic = (timings[f"quantize, {mode}{suffix}"].median for mode in ("nearest", "stochastic"))
        report(f"stochastic{suffix}: {stochastic / nearest:.3f}x the time to nearest")
    return kept


def time_all(report: harness.Report, x: Tensor, wanted: Sequence[str], repeats: int) -> dict:
    """Time all subjects and available peers on x: {"copy": bytes/s, "copied_by": how, "subjects": [...]}."""
    state = torch.tensor([1, 2], device=x.device)
    amax = torch.ops.nvfp4.amax(x, -1)
    packed = torch.ops.nvfp4.quantize(x, amax, state, NEAREST.pack())
    makers = {"torchao": lambda: torchao_peers(x), "compiled": lambda: compiled_peers(x, amax, state, packed)}
    items = subjects(x, state, {name: makers[name]() for name in wanted})
    variants = [Variant(item.name, item.run, item.moved) for item in items]
    variants += [
        Variant(f"{item.name} / {peer}", run, item.moved) for item in items for peer, run in item.peers.items()
    ]
    timings = harness.measure(variants, x.device, repeats=repeats)
    limit = timings[harness.COPY]
    return {"copy": limit.bandwidth, "copied_by": limit.name, "subjects": show(report, items, timings, wanted)}


# --- command line -----------------------------------------------------------------------------------------------------


def shape(text: str) -> tuple[int, int]:
    rows, columns = harness.shape(text)
    if columns % BLOCK:
        raise argparse.ArgumentTypeError(f"columns are a multiple of {BLOCK} here, for the peers' sake: {text}")
    return rows, columns


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--shapes", type=shape, nargs="+", help="default: 16384x16384 on CUDA, 4096x4096 on CPU")
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()])
    parser.add_argument("--repeats", type=int, help="timed runs of each variant (default: 50 on CUDA, 9 on CPU)")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS, help="default: all")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    repeats = arguments.repeats or (50 if device.type == "cuda" else 9)
    content, report = harness.record(device, repeats=repeats, runs=[]), harness.Report()
    where = content["machine"].get("gpu", content["machine"]["processor"])
    report(f"{where}, native: {content['native'][device.type]}")
    side = 16384 if device.type == "cuda" else 4096
    for (rows, columns), threads in itertools.product(arguments.shapes or [(side, side)], arguments.threads):
        torch.set_num_threads(threads)
        on = f", {threads} threads" if device.type == "cpu" else ""
        report(f"\n{rows}x{columns}{on}, median of {repeats}")
        x = torch.randn(rows, columns, device=device, generator=torch.Generator(device).manual_seed(0)).bfloat16()
        run = {"shape": [rows, columns], "threads": threads, **time_all(report, x, arguments.peers, repeats)}
        content["runs"].append(run)
    harness.save(harness.result_path(device, "quantize", arguments.out), content, report.text)


if __name__ == "__main__":
    main()
