"""``nvfp4 inspect``: the format, bits and scales of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nvfp4_cli import options
from nvfp4_cli.options import CHECKPOINT
from nvfp4_cli.results import megabytes, number, plain, prints_to_stderr, show, size_of, table

if TYPE_CHECKING:
    from nvfp4_tensor.checkpoints.inspection import Inspection, Weight


@click.command(short_help="Show bits, scales, clipped and NaN blocks.")
@click.argument("path", type=CHECKPOINT)
@click.option("--all", "every", is_flag=True, help="List dense tensors too.")
@options.summary
@options.html
@options.quiet
@options.as_json
def inspect(path: Path, every: bool, summary: bool, html: Path | None, progress: bool, json_: bool) -> None:
    """Show the format of a checkpoint, its bits per weight, its scales, and the blocks that are clipped, zero or NaN.

    A block counts as clipped if its scale is 448, the largest there is: its largest number has been cut off, or just
    fits. NVIDIA's rule makes one such block per per-tensor scale.

    \b
    nvfp4 inspect SmolLM2-NVFP4
    nvfp4 inspect SmolLM2-NVFP4 --summary
    nvfp4 inspect model.gguf --html report.html
    nvfp4 inspect SmolLM2-NVFP4 --json | jq .total
    """
    with prints_to_stderr(json_):
        from nvfp4_tensor.checkpoints import inspection

        found = inspection.inspect(path, progress=progress)
        listed = found.tensors if every else found.listed
        if html is not None:
            from nvfp4_cli.report import write_inspection

            write_inspection(html, path, found, HEAD, list(map(_cells, listed)))
    rows = () if summary else listed
    show(as_json(path, found, rows) if json_ else as_text(path, found, rows), json_)


def as_json(path: Path, found: Inspection, listed: tuple[Weight, ...]) -> Any:
    """What --json prints."""
    tensors = [
        {key: value for key, value in plain(weight).items() if key != "scale_bytes" and value is not None}
        for weight in listed
    ]
    head = {"path": path, "format": found.format, "architecture": found.architecture, "bytes": size_of(path)}
    head |= {"coded": found.coded} if found.coded else {}
    return {**head, "total": found.total(), "tensors": tensors}


def as_text(path: Path, found: Inspection, listed: tuple[Weight, ...]) -> str:
    """Sums, and a table of the tensors."""
    total = found.total()
    fp8 = f" and {total['fp8_tensors']} FP8" if total["fp8_tensors"] else ""
    lines = [
        f"{path}: {found.format}, {found.architecture or 'unknown architecture'}, {megabytes(size_of(path))}",
        f"{total['quantized_tensors']} of {total['tensors']} tensors are NVFP4{fp8}, {total['quantized_numbers']:,} of "
        f"{total['numbers']:,} numbers; {total['bits_of_quantized']:.2f} bits per quantized weight, "
        f"{total['bits']:.2f} over all",
    ]
    for kind, count in found.coded.items():
        lines.append(f"{count} weights are {kind}: `nvfp4 quantize` reads them, and rounds a second time")
    if total["scales"]:
        low, high = total["scales"]
        lines.append(
            f"{total['blocks']:,} blocks, scales {low:g} to {high:g}: {total['clipped']:,} clipped (scale 448), "
            f"{total['zero']:,} zero, {total['nan']:,} NaN"
        )
    return "\n".join([*lines, "", table(HEAD, list(map(_cells, listed)))] if listed else lines)


HEAD = ("tensor", "shape", "kind", "bits", "per-tensor scale", "block scales", "clipped", "zero", "NaN")


def _cells(weight: Weight) -> tuple[str, ...]:
    """A row of the table."""
    first = weight.name, "x".join(map(str, weight.shape)), weight.kind, f"{weight.bits:.2f}"
    if weight.per_tensor_scale is None:
        return (*first, "", "", "", "", "")
    low, high = (number(scale, 3) for scale in weight.per_tensor_scale)
    per_tensor = low if weight.per_tensor_scale[0] == weight.per_tensor_scale[1] else f"{low} - {high}"
    scales = "-" if weight.scales is None else f"{weight.scales[0]:g} - {weight.scales[1]:g}"
    return (*first, per_tensor, scales, str(weight.clipped), str(weight.zero), str(weight.nan))
