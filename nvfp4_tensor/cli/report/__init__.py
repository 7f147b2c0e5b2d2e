"""Reports: what ``inspect`` and ``compare`` found, as one HTML file that needs no other and fetches nothing."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path

import torch
from jinja2 import Environment, PackageLoader, select_autoescape
from markupsafe import Markup

import nvfp4_tensor
from nvfp4_tensor.cli import compare, inspect
from nvfp4_tensor.cli.inspect import CODES, Inspection
from nvfp4_tensor.cli.quality import Quality, by_gain
from nvfp4_tensor.cli.report.charts import Mark, bars, line
from nvfp4_tensor.cli.results import megabytes, number
from nvfp4_tensor.numerics.layout import E4M3_NAN

_SUGGESTED = 5
"""How many groups of layers a report suggests to leave dense."""

_WHAT_TO_LEAVE = (
    "First where each bit more removes most of the squared errors of outputs; linears that servers join, together. To "
    "choose by what the whole model says: nvfp4 quantize SRC DST --calibrate TEXT --bits 5."
)

_WITH_THE_ORIGINAL = (
    "No checkpoint says how far it is from what it was made of. Beside that one, DENSE, and on sample text, compare's "
    "report has the error of each layer and of its output, which layers to leave dense, and bits against perplexity:"
)


@dataclasses.dataclass(frozen=True)
class Section:
    """A heading, what it says, and a chart, a table or a command below."""

    title: str
    text: str
    chart: Markup | str = ""
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    code: str = ""


def write_inspection(file: Path, found: Inspection) -> None:
    """The report of ``nvfp4 inspect``.

    Raises:
        OSError: the file cannot be written.
    """
    total = found.total()
    facts = [
        ("format", found.format),
        ("weights' files", megabytes(found.bytes)),
        ("tensors in NVFP4", f"{total['quantized_tensors']} of {total['tensors']}"),
        ("bits a quantized weight", f"{total['bits_of_quantized']:.2f}"),
        ("bits over all", f"{total['bits']:.2f}"),
        ("clipped blocks", f"{total['clipped']:,}"),
        ("zero blocks", f"{total['zero']:,}"),
        ("NaN blocks", f"{total['nan']:,}"),
    ]
    sections = _histograms(found) if found.quantized else []
    listed = found.tensors if found.every else found.quantized
    text = "A click on a column's name sorts by it. Clipped are blocks whose scale is 448, the largest there is."
    sections.append(Section("Tensors", text, head=inspect.HEAD, rows=[weight.cells() for weight in listed]))
    if found.quantized:
        command = f"nvfp4 compare DENSE {shlex.quote(str(found.path))} --text TEXT --sweep 5 --html compare.html"
        sections.append(Section("Errors, and what to leave dense", _WITH_THE_ORIGINAL, code=command))
    _write(file, found.path.name, f"{found.architecture or 'unknown architecture'}, {found.path}", facts, sections)


def _histograms(found: Inspection) -> list[Section]:
    codes = found.counts("codes", 16)
    order = [*range(15, 8, -1), 8, *range(8)]  # from -6 to 6
    shares = [Mark(CODES[i], codes[i] / sum(codes), f"{CODES[i]}: {codes[i]:,} of {sum(codes):,}") for i in order]
    scales = found.counts("scale_bytes", 256)
    values = torch.arange(E4M3_NAN, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist()
    present = [i for i, count in enumerate(scales[:E4M3_NAN]) if count]
    shown = range(present[0], present[-1] + 1) if present else range(0)
    counts = [
        Mark(f"{values[i]:g}", scales[i], f"{values[i]:g}: {scales[i]:,} blocks", "bad" if i == E4M3_NAN - 1 else "")
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
            "Block scales", "How many blocks have each scale; 448, where blocks may be clipped, in another colour.",
            bars(counts, unit="blocks", log=True),
        ),
        Section(
            "Per-tensor scales", "By tensor, in the order of the files.",
            bars(factors, unit="per-tensor scale", log=True),
        ),
    ]  # fmt: skip


def write_comparison(file: Path, found: compare.Comparison) -> None:
    """The report of ``nvfp4 compare``.

    Raises:
        OSError: the file cannot be written.
    """
    facts = [
        ("a", found.formats[0]),
        ("b", found.formats[1]),
        ("weights' files", f"{megabytes(found.bytes[0])} -> {megabytes(found.bytes[1])}"),
        ("relative error", number(found.relative)),
        ("signal to noise", "identical" if found.snr is None else f"{found.snr:.2f} dB"),
    ]
    errors = [
        Mark(str(i), layer.relative, f"{layer.name}: {layer.relative:.4g}") for i, layer in enumerate(found.changed)
    ]
    text = "The norm of b - a over that of a, for each tensor that is quantized or differs."
    sections = [Section("Error of each layer's weight", text, bars(errors, unit="relative error"))]
    if found.quality is not None:
        facts += _facts(found.quality)
        sections += _of_text(found.quality)
    blocks = [(f"{b.name} [{b.row}, {b.column}:]", number(b.error), f"{b.relative:.3f}") for b in found.worst]
    sections += [
        Section("Tensors", "A click on a column's name sorts by it.", head=compare.HEAD, rows=_rows(found)),
        Section("Worst blocks", "16 neighbours each.", head=("block", "error", "over its size"), rows=blocks),
    ]
    _write(file, f"{found.a.name} and {found.b.name}", f"a: {found.a}, b: {found.b}", facts, sections)


def _rows(found: compare.Comparison) -> list[tuple[str, ...]]:
    return [layer.cells() for layer in found.changed]


def _facts(quality: Quality) -> list[tuple[str, str]]:
    before, after = quality.perplexity
    return [
        ("perplexity", f"{before:.3f} -> {after:.3f}"),
        ("KL of the logits, nats", number(quality.divergence)),
        ("same likeliest token", f"{quality.agreement:.1%}"),
        ("tokens", f"{quality.tokens:,}"),
    ]


def _of_text(quality: Quality) -> list[Section]:
    if not quality.outputs:
        return []
    by_error = sorted(quality.outputs, key=lambda output: -output.relative)
    errors = [Mark(str(i), o.relative, f"{o.name}: {o.relative:.4g}") for i, o in enumerate(by_error)]
    suggested = [output.name for group in by_gain(quality.outputs)[:_SUGGESTED] for output in group]
    command = "nvfp4 quantize SRC DST " + " ".join(f"--exclude {name}" for name in suggested)
    rows = [(o.name, number(o.relative), f"{o.bits / 8e6:.3f}", f"{o.dense_bits / 8e6:.3f}") for o in quality.outputs]
    sections = [
        Section(
            "Error of each layer's output", f"On {quality.text.name}, each fed what a's layer is fed; largest first.",
            bars(errors, unit="relative error of the output"),
        ),
        Section(
            "What to leave dense", _WHAT_TO_LEAVE,
            head=("layer", "error of the output", "MB in b", "MB in a"), rows=rows, code=command,
        ),
    ]  # fmt: skip
    if quality.sweep:
        points = [
            (p.bits, p.perplexity, f"{p.dense_layers} left dense: {p.bits:.2f} bits, perplexity {p.perplexity:.3f}")
            for p in quality.sweep
        ]
        text = "With more and more of these layers as they are in a."
        chart = line(points, unit="perplexity", below="bits a weight of these layers")
        sections.insert(1, Section("Bits against perplexity", text, chart))
    return sections


def _write(file: Path, title: str, subtitle: str, facts: Sequence[tuple[str, str]], sections: list[Section]) -> None:
    loader = PackageLoader("nvfp4_tensor.cli.report", "")
    page = Environment(loader=loader, autoescape=select_autoescape()).get_template("template.html")
    text = page.render(title=title, subtitle=subtitle, facts=facts, sections=sections, version=nvfp4_tensor.__version__)
    file.write_text(text, encoding="utf-8")
