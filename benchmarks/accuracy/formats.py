"""What each 4-bit format, and a few wider ones, loses: RMSE and SQNR over drawn data and over a real model's.

    python -m benchmarks.accuracy.formats                 # all of it: a table, a record and a picture
    python -m benchmarks.accuracy.formats --no-model      # drawn data alone
    python -m benchmarks.accuracy.formats --formats EDEN  # those of such names; a record's other rows stay
    python -m benchmarks.accuracy.formats --report FILE   # table and picture of a file

Drawn data are float32 of unit variance, rows of 1024. The model is the demo's SmolLM2-135M: the weights of the linears
of every fifth decoder block, and what enters these linears over 512 tokens. Its file holds the weights in another 4-bit
format (Q4_1, groups of 32 with a scale and an offset), so they are not what training left; formats with blocks of
another size meet them as they would any others.

RMSE is relative to the root mean square of the data; over several tensors, relative squared errors are averaged.
SQNR is -20 log10 of it, in dB.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.harness import Report, record, result_path, save, table, with_earlier
from nvfp4_tensor import QuantizeSpec, emulation, fake_quantize
from nvfp4_tensor.emulation import FORMATS

Cast = Callable[[Tensor], Tensor]
DISTRIBUTIONS = ("normal", "Laplace", "Student-t 5", "uniform")
REAL = ("weights", "activations")
TOKENS = 512
EVERY = 5
"""Of the decoder blocks, each fifth."""


def _nvfp4(**options) -> tuple[float, Cast]:
    spec = QuantizeSpec(**options)
    state = torch.tensor([1, 2])
    return 4.5, lambda x: fake_quantize(x, spec, rng_state=state if spec.is_stochastic else None, dtype=torch.float32)


def _emulated(name: str, scale_mode: str | None = None) -> tuple[float, Cast]:
    cast = functools.partial(emulation.cast, format=name, scale_mode=scale_mode)
    return FORMATS[name].bits_per_element, lambda x: cast(x.float())


def variants() -> dict[str, tuple[float, Cast]]:
    """(bits an element, cast to float32) by name, in the order of the table."""
    return {
        "NVFP4": _nvfp4(),
        "NVFP4, four-over-six": _nvfp4(four_over_six="mse"),
        "NVFP4, scale search": _nvfp4(scale_search="mse"),
        "NVFP4, scales up": _nvfp4(scale_rounding="up"),
        "NVFP4, stochastic": _nvfp4(round_mode="stochastic"),
        "NVFP4, stochastic, scales up": _nvfp4(round_mode="stochastic", scale_rounding="up"),
        "NVFP4, EDEN": _nvfp4(round_mode="eden"),
        "NVFP4, 16x16 tiles": _nvfp4(block_rows=16),
        "NVFP4, a scale a row": _nvfp4(row_scaled=True),
        **{f"MXFP4, {mode.value}": _emulated("mxfp4", mode.value) for mode in emulation.modes.POWERS_OF_TWO},
        "int4, groups of 32": _emulated("int4"),
        "MXFP6 e2m3": _emulated("mxfp6_e2m3"),
        "MXFP8 e4m3": _emulated("mxfp8_e4m3"),
        "MXFP8 e4m3, topbinade": _emulated("mxfp8_e4m3", "topbinade"),
    }


def drawn(name: str, rows: int, columns: int = 1024) -> Tensor:
    """float32 (rows, columns) of unit variance."""
    torch.manual_seed(0)
    shape = (rows, columns)
    if name == "normal":
        return torch.randn(shape)
    if name == "Laplace":
        return torch.distributions.Laplace(0.0, 0.5**0.5).sample(shape)
    if name == "Student-t 5":  # variance 5/3
        return torch.distributions.StudentT(5.0).sample(shape) * 0.6**0.5
    assert name == "uniform"
    return (torch.rand(shape) * 2 - 1) * 3**0.5


def model_tensors() -> dict[str, list[Tensor]]:
    """{"weights": [...], "activations": [...]} of every fifth decoder block; an input that linears share comes once."""
    from nvfp4_cli.demo.model import evaluation_tokens, load_model

    model, tokenizer = load_model()
    found: dict[str, list[Tensor]] = {name: [] for name in REAL}
    inputs_kept: list[Tensor] = []  # held, so that no other tensor gets the address of one

    def keep(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if not any(inputs[0] is x for x in inputs_kept):
            inputs_kept.append(inputs[0])
            found["activations"].append(inputs[0].flatten(0, -2))

    hooks = []
    for block in model.model.layers[::EVERY]:
        for module in block.modules():
            if isinstance(module, torch.nn.Linear):
                found["weights"].append(module.weight.detach())
                hooks.append(module.register_forward_pre_hook(keep))
    with torch.no_grad():
        model(evaluation_tokens(tokenizer, TOKENS).unsqueeze(0))
    for hook in hooks:
        hook.remove()
    return found


def relative_error(cast: Cast, tensors: list[Tensor]) -> float:
    """The root of the mean, over the tensors, of the squared error by the mean square of the tensor."""
    ratios = [_squared_error(cast, x) / x.double().square().sum().item() for x in tensors]
    return math.sqrt(sum(ratios) / len(ratios))


def _squared_error(cast: Cast, x: Tensor) -> float:
    # The tensor scale is that of the whole, so rows are not cast apart.
    return (cast(x).double() - x.double()).square().sum().item()


def sqnr(error: float) -> float:
    """Signal to quantization noise in dB."""
    return -20 * math.log10(error)


def rows_of(data: dict[str, list[Tensor]], words: Sequence[str] = ()) -> Iterator[dict]:
    """A row a format whose name has one of the words; all formats where there are none."""
    for name, (bits, cast) in variants().items():
        if words and not any(word in name for word in words):
            continue
        errors = {subject: relative_error(cast, tensors) for subject, tensors in data.items()}
        print(
            f"{name}: " + ", ".join(f"{subject} {sqnr(error):.2f} dB" for subject, error in errors.items()), flush=True
        )
        yield {"format": name, "bits": bits, "rmse": errors}


def tables(rows: list[dict]) -> str:
    """RMSE and SQNR, a row a format."""
    subjects = list(rows[0]["rmse"])
    header = ("format", "bits", *subjects)
    rmse = [(r["format"], f"{r['bits']:.2f}", *(f"{r['rmse'][s]:.4f}" for s in subjects)) for r in rows]
    noise = [(r["format"], f"{r['bits']:.2f}", *(f"{sqnr(r['rmse'][s]):.2f}" for s in subjects)) for r in rows]
    return f"RMSE, relative\n{table(header, rmse)}\n\nSQNR, dB\n{table(header, noise)}"


def draw(rows: list[dict], path: Path) -> None:
    """SQNR of each format, a mark for each kind of data; the 4-bit formats apart from the wider ones."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    parts = [[row for row in rows if (row["bits"] < 5) == is_four] for is_four in (True, False)]
    parts = [part for part in parts if part]
    heights = {"height_ratios": [len(part) for part in parts]}
    with plt.rc_context({"axes.spines.top": False, "axes.spines.right": False, "font.size": 10}):
        figure, panels = plt.subplots(
            len(parts), 1, figsize=(9, 7), layout="constrained", gridspec_kw=heights, squeeze=False
        )
        panels = panels[:, 0]
        for axes, part in zip(panels, parts, strict=True):
            for subject, marker, color in zip(part[0]["rmse"], "o^sDP*", plt.get_cmap("tab10").colors, strict=False):
                values = [sqnr(row["rmse"][subject]) for row in part]
                axes.plot(values, range(len(part)), marker, color=color, label=subject, markersize=7, alpha=0.85)
            axes.set_yticks(range(len(part)), [f"{row['format']} ({row['bits']:g} bits)" for row in part])
            axes.set_ylim(len(part) - 0.5, -0.5)
            axes.grid(alpha=0.3)
        marks, subjects = panels[0].get_legend_handles_labels()
        figure.legend(marks, subjects, loc="outside upper center", ncols=6, frameon=False, handletextpad=0.2)
        panels[-1].set_xlabel("SQNR, dB: higher is better")
        figure.savefig(path, dpi=120)
        plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024, help="rows of drawn data, a multiple of 16")
    parser.add_argument("--no-model", action="store_true", help="leave out SmolLM2's weights and activations")
    parser.add_argument("--formats", nargs="*", default=[], metavar="WORD", help="words of the names of those to run")
    parser.add_argument("--report", type=Path, help="the table and the picture of an earlier record")
    parser.add_argument("--out", type=Path, help="the folder for the record; benchmarks/results by default")
    parser.add_argument("--picture", type=Path, default=Path("docs/images/formats.png"))
    options = parser.parse_args()
    if options.report:
        rows = json.loads(options.report.read_text())["rows"]
        print(tables(rows))
        return draw(rows, options.picture)
    data = {name: [drawn(name, options.rows)] for name in DISTRIBUTIONS}
    if not options.no_model:
        data |= model_tensors()
    device = torch.device("cpu")
    path = result_path(device, "formats", options.out)
    counted = {name: sum(x.numel() for x in tensors) for name, tensors in data.items()}
    rows = with_earlier(list(rows_of(data, options.formats)), path, "format", elements=counted)
    rows.sort(key=lambda row: list(variants()).index(row["format"]))
    report = Report()
    report(tables(rows))
    save(path, record(device, elements=counted, rows=rows), report.text)
    draw(rows, options.picture)


if __name__ == "__main__":
    main()
