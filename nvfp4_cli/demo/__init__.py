"""``nvfp4 demo``: a real model in NVFP4, as a table."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import click

from nvfp4_cli import options
from nvfp4_cli.options import NEW
from nvfp4_cli.results import prints_to_stderr, show

_PACKAGES = ("tqdm", "transformers", "gguf", "accelerate")


@click.command(short_help="Try NVFP4 on a real model.")
@click.option("--output", type=NEW, default=Path("demo_output"), show_default=True, help="Folder for the results.")
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@options.as_json
def demo(output: Path, device: str, json_: bool) -> None:
    """Quantize a real model in several ways: a table of them, and a checkpoint saved and loaded again."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"the demo needs {', '.join(missing)}: pip install 'nvfp4-tensor[demo]', or run `make demo`")
    from nvfp4_cli.demo.run import run

    with prints_to_stderr(json_):
        rows = run(output, device)
    if json_:
        show(rows, json_)
