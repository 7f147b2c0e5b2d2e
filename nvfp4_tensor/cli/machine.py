"""``nvfp4 info``, ``selftest --json`` and ``demo``: what they give."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import TYPE_CHECKING, Any

from nvfp4_tensor.cli.results import plain
from nvfp4_tensor.info import Info, info
from nvfp4_tensor.testing import selftest

if TYPE_CHECKING:
    from nvfp4_tensor.cli.demo.table import Row

_DEMO_PACKAGES = ("matplotlib", "tqdm", "transformers", "gguf", "accelerate")


@dataclasses.dataclass(frozen=True)
class Installed:
    """:func:`nvfp4_tensor.info`, for a person and for a program."""

    info: Info

    def as_json(self) -> Any:
        return plain(self.info)

    def __str__(self) -> str:
        return str(self.info)


def installed() -> Installed:
    """What ``nvfp4 info`` shows."""
    return Installed(info())


@dataclasses.dataclass(frozen=True)
class Checks:
    """What the self-test found."""

    info: Info
    checks: tuple[selftest.Check, ...]

    @property
    def status(self) -> int:
        """1 where something differs from the reference, else 0."""
        return int(any(check.differing for check in self.checks))

    def as_json(self) -> Any:
        return {"agree": not self.status, "info": plain(self.info), "checks": plain(self.checks)}


def checks() -> Checks:
    """All checks of the self-test."""
    return Checks(info(), tuple(selftest.run()))


@dataclasses.dataclass(frozen=True)
class DemoResult:
    """The rows of the demo's table."""

    rows: list[Row]

    def as_json(self) -> Any:
        return plain(self.rows)


def check_demo_packages() -> None:
    """Raises an ImportError that says how the demo's packages are installed."""
    missing = [name for name in _DEMO_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"the demo needs {', '.join(missing)}: pip install 'nvfp4-tensor[demo]', or run `make demo`")
