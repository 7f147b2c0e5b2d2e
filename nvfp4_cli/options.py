"""Arguments that several commands take, and how a result is shown."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

FORMATS = ("modelopt", "compressed-tensors", "gguf", "mlx", "comfy", "torchao")
"""What is written; a test compares it with ``nvfp4_tensor.checkpoints.FORMATS``."""
DENSE_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
"""What GGUF stores dense matrices as; compared with ``nvfp4_tensor.checkpoints.formats.gguf.format.DENSE_TYPES``."""

CHECKPOINT = click.Path(exists=True, path_type=Path)
TEXT = click.Path(exists=True, dir_okay=False, path_type=Path)
SEED = click.IntRange(-(2**63), 2**63 - 1)
NEW = click.Path(path_type=Path)


class Finite(click.FloatRange):
    """A range of numbers, of which "nan" and "inf" are none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is no finite number.", param, ctx)
        return number


def _writable(context: click.Context, parameter: click.Parameter, file: Path | None) -> Path | None:
    """A file that can be written, so that minutes of work are not lost at their end."""
    if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
        raise click.BadParameter(f"{file} cannot be written: expected a file in a folder that is there")
    return file


as_json = click.option("--json", "json_", is_flag=True, help="Print one JSON object instead of text.")
quiet = click.option("-q", "--quiet", is_flag=True, help="No progress bar.")
html = click.option(
    "--html", type=NEW, metavar="FILE", callback=_writable, help="Write a report: one HTML file that needs no other."
)
to = click.option("--to", type=click.Choice(FORMATS), default="modelopt", show_default=True, help="The format of DST.")
dense = click.option("--dense", type=click.Choice(DENSE_TYPES), help="GGUF: what dense matrices are stored as.")
shard_size = click.option(
    "--shard-size", metavar="GB", type=Finite(0, 1e9, min_open=True),
    help="Files of about so many gigabytes (10^9).",
)  # fmt: skip
lossy = click.option("--lossy", is_flag=True, help="MLX: round again what its layers have no place for.")
global_scale = click.option(
    "--global-scale", is_flag=True, help="MLX: keep per-tensor scales, in tensors that mlx-lm does not load."
)
quantize_activations = click.option(
    "--quantize-activations/--no-quantize-activations", default=None,
    help="ComfyUI: whether it quantizes activations too; by default as SRC says.",
)  # fmt: skip
config_from = click.option(
    "--config-from", type=CHECKPOINT, metavar="PATH", help="Where config and tokenizer are, if not in the checkpoint."
)


class Result(Protocol):
    """What a command gives: ``str`` is for a person, ``as_json`` for a program."""

    def as_json(self) -> Any: ...


def show(result: Result, json_: bool) -> None:
    """Print a result."""
    click.echo(json.dumps(result.as_json(), indent=2, allow_nan=False) if json_ else str(result))


def wants_bar(quiet: bool) -> bool:
    """A bar is for who looks at a terminal."""
    return not quiet and sys.stderr.isatty()


@contextlib.contextmanager
def prints_to_stderr(json_: bool) -> Iterator[None]:
    """With --json, stdout is for one JSON object alone."""
    with contextlib.redirect_stdout(sys.stderr) if json_ else contextlib.nullcontext():
        yield


def check_ending(dst: Path, to: str) -> None:
    """A folder is not called like a file, and a file is called like what it is.

    Raises:
        BadParameter: otherwise.
    """
    expected = {"gguf": ".gguf", "comfy": ".safetensors"}.get(to)
    if expected is not None and dst.suffix != expected:
        raise click.BadParameter(f"{to} is one file, called *{expected}, and not {dst.name}", param_hint="DST")
    if expected is None and dst.suffix in (".gguf", ".safetensors"):
        wanted = {".gguf": "gguf", ".safetensors": "comfy"}[dst.suffix]
        raise click.BadParameter(f"{to} is a folder, and {dst.name} a file: --to {wanted}?", param_hint="DST")


def of_format(command: F) -> F:
    """The options of formats, each of one or some; :func:`take_options_of_format` takes them out of what was given."""
    for decorator in (quantize_activations, lossy, global_scale, shard_size, dense):
        command = decorator(command)
    return command


OPTIONS = {
    "dense": ("gguf",),
    "quantize_activations": ("comfy",),
    "global_scale": ("mlx",),
    "lossy": ("mlx",),
    "shard_bytes": ("modelopt", "compressed-tensors", "mlx", "torchao"),
}
"""Which formats take what; a test asks the formats."""


def take_options_of_format(given: dict[str, Any], to: str) -> dict[str, Any]:
    """What the format ``to`` is asked for beyond its defaults, removed from ``given``.

    Raises:
        UsageError: it has no such option.
    """
    size = given.pop("shard_size")
    found = {name: given.pop(name) for name in ("dense", "quantize_activations")}
    found |= {name: given.pop(name) or None for name in ("global_scale", "lossy")}
    found["shard_bytes"] = None if size is None else int(size * 10**9)
    found = {name: value for name, value in found.items() if value is not None}
    for name in found:
        if to not in OPTIONS[name]:
            typed = "--shard-size" if name == "shard_bytes" else f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{typed} is for --to {' or '.join(OPTIONS[name])}, not for {to}")
    return found
