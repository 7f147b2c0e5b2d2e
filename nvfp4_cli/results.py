"""How commands print what they found: text to read, or JSON, which has neither NaN nor infinity."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click


def show(result: Any, json_: bool) -> None:
    """Print a result, as its ``str`` or as one JSON object."""
    click.echo(json.dumps(plain(result), indent=2, allow_nan=False) if json_ else str(result))


@contextlib.contextmanager
def prints_to_stderr(json_: bool) -> Iterator[None]:
    """With --json, leave stdout to the one JSON object."""
    with contextlib.redirect_stdout(sys.stderr) if json_ else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def writes(path: Path) -> Iterator[None]:
    """Let an interrupt before ``path`` is written say so; writers themselves say what is left of it."""
    try:
        yield
    except KeyboardInterrupt as error:
        error.args = error.args or (f"{path} was not written",)
        raise


def plain(value: Any) -> Any:
    """A result for JSON: dataclasses as objects, paths as strings, numbers that are not finite as null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value) if isinstance(value, Path) else value


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align columns: the first to the left, the others, which are numbers, to the right."""
    first, *others = (max(map(len, column)) for column in zip(head, *rows, strict=True))
    lines = []
    for name, *numbers in (head, *rows):
        cells = (cell.rjust(width) for cell, width in zip(numbers, others, strict=True))
        lines.append("  ".join((name.ljust(first), *cells)).rstrip())
    return "\n".join(lines)


def size_of(path: Path) -> int:
    """Bytes of a file, or of the files of weights in a folder."""
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.iterdir() if file.suffix in (".safetensors", ".gguf"))


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


def number(value: float | None, digits: int = 4) -> str:
    """Some significant digits; "-" for None, NaN and infinity."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}g}"
