"""The results of ``inspect`` and ``compare`` as one HTML file, which needs no other file and loads nothing."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, select_autoescape
from markupsafe import Markup

import nvfp4_tensor
from nvfp4_cli.report.charts import Mark, bars, line
from nvfp4_cli.results import megabytes, number, size_of
from nvfp4_tensor.checkpoints.comparison import Comparison
from nvfp4_tensor.checkpoints.inspection import CODES, SCALES, Inspection
from nvfp4_tensor.testing.model_quality import Quality, by_gain

_SUGGESTED = 5
"""How many groups of linears a report suggests to leave dense."""
_SORT = "Click a column's name to sort by it."

_WHAT_TO_LEAVE = (
    "First the linears where each additional bit removes most squared error of the outputs; linears that servers join "
    "stay together. To choose by the output of the model: nvfp4 quantize SRC DST --calibrate TEXT --bits 5."
)

_WITH_THE_ORIGINAL = (
    "A checkpoint does not show how far it is from its original. A comparison with the original, DENSE, on sample text "
    "gives the error of each tensor and of each output, which linears to leave dense, and bits against perplexity:"
)


@dataclasses.dataclass(frozen=True)
class Section:
    """A heading, a text, and a chart, a table or a command."""

    title: str
    text: str
    chart: Markup | str = ""
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    code: str = ""


def write_inspection(
    file: Path, path: Path, found: Inspection, head: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    """Write the report of ``nvfp4 inspect`` on a checkpoint, with its table.

    Raises:
        OSError: the file cannot be written.
    """
    total = found.total()
    facts = [
        ("format", found.format),
        ("files of weights", megabytes(size_of(path))),
        ("tensors in NVFP4", f"{total['quantized_tensors']} of {total['tensors']}"),
        ("bits per quantized weight", f"{total['bits_of_quantized']:.2f}"),
        ("bits over all", f"{total['bits']:.2f}"),
        ("clipped blocks", f"{total['clipped']:,}"),
        ("zero blocks", f"{total['zero']:,}"),
        ("NaN blocks", f"{total['nan']:,}"),
    ]
    sections = _histograms(found) if found.quantized else []
    text = f"{_SORT} Clipped blocks have the scale 448, the largest there is."
    sections.append(Section("Tensors", text, head=head, rows=rows))
    if found.quantized:
        command = f"nvfp4 compare DENSE {shlex.quote(str(path))} --text TEXT --sweep 5 --html compare.html"
        sections.append(Section("Errors, and what to leave dense", _WITH_THE_ORIGINAL, code=command))
    _write(file, path.name, f"{found.architecture or 'unknown architecture'}, {path}", facts, sections)


def _histograms(found: Inspection) -> list[Section]:
    codes = found.counts("codes", 16)
    order = [*range(15, 8, -1), 8, *range(8)]  # from -6 to 6
    shares = [Mark(CODES[i], codes[i] / sum(codes), f"{CODES[i]}: {codes[i]:,} of {sum(codes):,}") for i in order]
    scales = found.counts("scale_bytes", 256)
    present = [i for i in range(len(SCALES)) if scales[i]]
    shown = range(present[0], present[-1] + 1) if present else range(0)
    counts = [
        Mark(f"{SCALES[i]:g}", scales[i], f"{SCALES[i]:g}: {scales[i]:,} blocks", "bad" if SCALES[i] == 448 else "")
        for i in shown
    ]
    factors = [
        Mark(str(i), weight.per_tensor_scale[1], f"{weight.name}: {weight.per_tensor_scale[1]:.4g}")
        for i, weight in enumerate(found.quantized)
        if weight.per_tensor_scale is not None
    ]
    return [
        Section("Codes", "How often each of the 16 codes occurs.", bars(shares, unit="share of all codes")),
        Section(
            "Block scales", "How many blocks have each scale. At 448, in another colour, blocks may be clipped.",
            bars(counts, unit="blocks", log=True),
        ),
        Section(
            "Per-tensor scales", "Of each tensor, in the order of the files.",
            bars(factors, unit="per-tensor scale", log=True),
        ),
    ]  # fmt: skip


def write_comparison(
    file: Path, a: Path, b: Path, found: Comparison, head: Sequence[str], rows: Sequence[Sequence[str]],
    text: Path | None, quality: Quality | None,
) -> None:  # fmt: skip
    """Write the report of ``nvfp4 compare``, with its table; ``quality`` was measured on ``text``.

    Raises:
        OSError: the file cannot be written.
    """
    facts = [
        ("a", found.formats[0]),
        ("b", found.formats[1]),
        ("files of weights", f"{megabytes(size_of(a))} -> {megabytes(size_of(b))}"),
        ("relative error", number(found.relative)),
        ("signal to noise", "identical" if found.snr is None else f"{found.snr:.2f} dB"),
    ]
    errors = [
        Mark(str(i), layer.relative, f"{layer.name}: {layer.relative:.4g}") for i, layer in enumerate(found.changed)
    ]
    meaning = "The norm of b - a over that of a, for each tensor that is quantized or differs."
    sections = [Section("Error of each tensor", meaning, bars(errors, unit="relative error"))]
    if text is not None and quality is not None:
        before, after = quality.perplexity
        facts += [
            ("perplexity", f"{before:.3f} -> {after:.3f}"),
            ("KL of the logits, nats", number(quality.divergence)),
            ("same most likely token", f"{quality.agreement:.1%}"),
            ("tokens", f"{quality.tokens:,}"),
        ]
        sections += _of_text(text, quality)
    blocks = [(f"{b.name} [{b.row}, {b.column}:]", number(b.error), f"{b.relative:.3f}") for b in found.worst]
    sections += [
        Section("Tensors", _SORT, head=head, rows=rows),
        Section("Worst blocks", "16 neighbours each.", head=("block", "error", "over its norm"), rows=blocks),
    ]
    _write(file, f"{a.name} and {b.name}", f"a: {a}, b: {b}", facts, sections)


def _of_text(text: Path, quality: Quality) -> list[Section]:
    if not quality.outputs:
        return []
    by_error = sorted(quality.outputs, key=lambda output: -output.relative)
    errors = [Mark(str(i), o.relative, f"{o.name}: {o.relative:.4g}") for i, o in enumerate(by_error)]
    suggested = [output.name for group in by_gain(quality.outputs)[:_SUGGESTED] for output in group]
    command = "nvfp4 quantize SRC DST " + " ".join(f"--exclude {name}" for name in suggested)
    rows = [(o.name, number(o.relative), f"{o.bits / 8e6:.3f}", f"{o.dense_bits / 8e6:.3f}") for o in quality.outputs]
    sections = [
        Section(
            "Error of each linear's output", f"On {text.name}, with the inputs of the linear in a; largest first.",
            bars(errors, unit="relative error of the output"),
        ),
        Section(
            "What to leave dense", _WHAT_TO_LEAVE,
            head=("linear", "error of the output", "MB in b", "MB in a"), rows=rows, code=command,
        ),
    ]  # fmt: skip
    if quality.sweep:
        points = [
            (p.bits, p.perplexity, f"{p.dense_layers} left dense: {p.bits:.2f} bits, perplexity {p.perplexity:.3f}")
            for p in quality.sweep
        ]
        chart = line(points, unit="perplexity", below="bits per weight of these linears")
        sections.insert(1, Section("Bits against perplexity", "With more and more of these linears as in a.", chart))
    return sections


def _write(file: Path, title: str, subtitle: str, facts: Sequence[tuple[str, str]], sections: list[Section]) -> None:
    loader = PackageLoader("nvfp4_cli.report", "")
    page = Environment(loader=loader, autoescape=select_autoescape()).get_template("template.html")
    text = page.render(title=title, subtitle=subtitle, facts=facts, sections=sections, version=nvfp4_tensor.__version__)
    file.write_text(text, encoding="utf-8")
