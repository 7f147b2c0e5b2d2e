"""``nvfp4 info`` and ``nvfp4 selftest``: what is installed here, and whether its kernels are right."""

from __future__ import annotations

import click

from nvfp4_cli import options
from nvfp4_cli.results import show


@click.command(short_help="Show versions, and which kernels each device uses.")
@options.as_json
def info(json_: bool) -> None:
    """Show what is installed, and which kernels each device uses."""
    import nvfp4_tensor

    show(nvfp4_tensor.info(), json_)


@click.command(short_help="Check every kernel against the reference.")
@options.as_json
def selftest(json_: bool) -> int:
    """Check every kernel on this machine against the reference; the exit status is 1 if one differs."""
    from nvfp4_tensor.testing import selftest as kernels

    if not json_:
        return kernels.main()
    import nvfp4_tensor

    checks = tuple(kernels.run())
    agree = not any(check.differing for check in checks)
    show({"agree": agree, "info": nvfp4_tensor.info(), "checks": checks}, json_)
    return int(not agree)
