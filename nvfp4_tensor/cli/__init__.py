"""``python -m nvfp4_tensor``: info, selftest and demo."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path

_DEMO_PACKAGES = ("matplotlib", "tqdm", "transformers", "gguf", "accelerate")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit status."""
    options = _parser().parse_args(arguments)
    return options.command(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m nvfp4_tensor", description="NVFP4 for PyTorch.")
    commands = parser.add_subparsers(required=True, metavar="command")
    info = commands.add_parser("info", help="what is installed, and which kernels serve which device")
    info.set_defaults(command=_info)
    selftest = commands.add_parser("selftest", help="every kernel on this machine against the reference")
    selftest.set_defaults(command=_selftest)
    demo = commands.add_parser("demo", help="a real model in NVFP4: a table, and a picture of stochastic rounding")
    demo.add_argument("--output", type=Path, default=Path("demo_output"), help="folder for the results (%(default)s)")
    demo.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    demo.set_defaults(command=_demo)
    return parser


def _info(options: argparse.Namespace) -> int:
    from nvfp4_tensor import info

    print(info())
    return 0


def _selftest(options: argparse.Namespace) -> int:
    from nvfp4_tensor.testing.selftest import main

    return main()


def _demo(options: argparse.Namespace) -> int:
    missing = [name for name in _DEMO_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        print(f"the demo needs {', '.join(missing)}: pip install 'nvfp4-tensor[demo]', or run `make demo`")
        return 1
    from nvfp4_tensor.cli import demo

    demo.run(options.output, options.device)
    return 0
