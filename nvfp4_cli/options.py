"""Options that several commands have."""

from __future__ import annotations

import functools
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

FORMATS = ("modelopt", "compressed-tensors", "gguf", "mlx", "comfy", "torchao")
"""The formats that are written; a test compares them with ``nvfp4_tensor.checkpoints.FORMATS``."""
DENSE_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
"""GGUF's types for dense matrices; a test compares them with ``...formats.gguf.format.DENSE_TYPES``."""

REPORT = b'<meta name="generator" content="nvfp4">'
"""In the first :data:`_HEAD` bytes of each report; nothing else is replaced by one."""
_HEAD = 256

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class Checkpoint(click.Path):
    """An existing path. A name of the hub raises an error that says how to download it: no command here downloads."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            if not _HUB_NAME.fullmatch(str(value)) or Path(value).parent.is_dir():
                raise
            folder = str(value).partition("/")[2]
            self.fail(
                f"Path '{value}' does not exist. For the model of that name on the hub, run: hf download {value} "
                f"--local-dir {folder} and then give {folder} here.",
                param,
                ctx,
            )


CHECKPOINT = Checkpoint(exists=True, path_type=Path)


class TextOrSelf(click.Path):
    """A text file, or "self"."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value == "self" else super().convert(value, param, ctx)


TEXT = click.Path(exists=True, dir_okay=False, path_type=Path)
SEED = click.IntRange(-(2**63), 2**63 - 1)
NEW = click.Path(path_type=Path)


class Finite(click.FloatRange):
    """A range of numbers without "nan" and "inf"."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


def _writable(context: click.Context, parameter: click.Parameter, file: Path | None) -> Path | None:
    """Check that a file can be written before the work whose result it gets, and that only a report is replaced."""
    if file is None:
        return None
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise click.BadParameter(f"{file} cannot be written: expected a file in an existing folder")
    if file.is_file() and file.stat().st_size:
        with file.open("rb") as opened:
            if REPORT not in opened.read(_HEAD):
                raise click.BadParameter(
                    f"{file} exists and is not a report of nvfp4: choose another name, or remove it"
                )
    return file


def _tokenizer(context: click.Context, parameter: click.Parameter, given: str | None) -> Path | str | None:
    """A folder that has one, or "none"."""
    if given is None or given == "none":
        return given
    if not (Path(given) / "tokenizer.json").is_file():
        raise click.BadParameter(f"{given} has no tokenizer.json: name a folder that has, or none")
    return Path(given)


as_json = click.option("--json", "json_", is_flag=True, help="Print one JSON object instead of text.")
quiet = click.option(
    "-q", "--quiet", "progress", is_flag=True, callback=lambda context, parameter, off: not off and sys.stderr.isatty(),
    help="Show no progress bar.",
)  # fmt: skip
summary = click.option("--summary", is_flag=True, help="Show the totals only, no row per tensor.")
html = click.option(
    "--html", type=NEW, metavar="FILE", callback=_writable, help="Write a report: one self-contained HTML file."
)
to = click.option("--to", type=click.Choice(FORMATS), default="modelopt", show_default=True, help="The format of DST.")
config_from = click.option(
    "--config-from", type=CHECKPOINT, metavar="PATH",
    help="A checkpoint with the configuration and the tokenizer, if this one has none.",
)  # fmt: skip


def together(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Return a decorator that adds several options."""
    return lambda command: functools.reduce(lambda done, option: option(done), reversed(options), command)


of_format = together(
    click.option("--dense", type=click.Choice(DENSE_TYPES), help="GGUF: the type of dense matrices."),
    click.option(
        "--shard-size", "shard_bytes", metavar="GB", type=Finite(0, 1e9, min_open=True),
        callback=lambda context, parameter, size: None if size is None else int(size * 10**9),
        help="Folders: the size of a file, in gigabytes (10^9).",
    ),
    click.option(
        "--global-scale", is_flag=True, default=None,
        help="MLX: keep per-tensor scales, in tensors that mlx-lm ignores.",
    ),
    click.option(
        "--lossy", is_flag=True, default=None,
        help="MLX, and GGUF of Qwen2: quantize weights again that cannot be stored exactly.",
    ),
    click.option(
        "--quantize-activations/--no-quantize-activations", default=None,
        help="ComfyUI: whether it quantizes activations; by default as in SRC.",
    ),
    click.option(
        "--tokenizer", metavar="FOLDER|none", callback=_tokenizer,
        help="GGUF: the folder of its tokenizer, by default that of SRC; none: token ids only.",
    ),
)  # fmt: skip
"""The options that only some formats have; :func:`take_options_of_format` reads them."""
OPTIONS = {
    "dense": ("gguf",),
    "tokenizer": ("gguf",),
    "quantize_activations": ("comfy",),
    "global_scale": ("mlx",),
    "lossy": ("mlx", "gguf"),
    "shard_bytes": ("modelopt", "compressed-tensors", "mlx", "torchao"),
}
"""The formats that have each option; a test asks the formats."""


def take_options_of_format(given: dict[str, Any], to: str, dst: Path) -> dict[str, Any]:
    """Check ``dst``, and remove from ``given`` the options of formats; return those that are set.

    Raises:
        BadParameter: the name of ``dst`` is not one of the format ``to``.
        UsageError: the format does not have one of the options.
    """
    _check_name(dst, to)
    found = {name: value for name in OPTIONS if (value := given.pop(name)) is not None}
    for name in found:
        if to not in OPTIONS[name]:
            option = "--shard-size" if name == "shard_bytes" else f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{option} is for --to {' or '.join(OPTIONS[name])}, not for {to}")
    if found.get("tokenizer") == "none":
        found["tokenizer"] = None
    return found


def _check_name(dst: Path, to: str) -> None:
    endings = {"gguf": ".gguf", "comfy": ".safetensors"}
    ending = endings.get(to)
    if ending is not None and dst.suffix != ending:
        raise click.BadParameter(f"--to {to} writes one file: expected *{ending}, got {dst.name}", param_hint="DST")
    for other, name in endings.items():
        if ending is None and dst.suffix == name:
            raise click.BadParameter(f"--to {to} writes a folder, not a {name}: use --to {other}?", param_hint="DST")
