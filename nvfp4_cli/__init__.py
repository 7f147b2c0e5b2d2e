"""The command line ``nvfp4``: what may be typed. What the commands do is in ``nvfp4_tensor.cli``.

It stands beside nvfp4_tensor, which imports torch, so that help, completion and wrong arguments take a tenth of a
second and not some: a command imports what it needs when it runs.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import click

from nvfp4_cli.commands import nvfp4

TRACEBACK = "NVFP4_TRACEBACK"
"""Set in the environment, it lets errors through with their traceback."""

FAILED, WRONG_ARGUMENTS, BROKEN_PIPE, INTERRUPTED = 1, 2, 141, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit status: 0 done, 1 it could not be done, 2 wrong arguments, 130 interrupted.

    Errors that a user can mend (ValueError, TypeError, RuntimeError, OSError, ImportError) are one line on stderr, with
    ``--json`` a JSON object; anything else is a fault of ours and keeps its traceback.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    warnings.showwarning = _show_warning
    try:
        status = nvfp4.main(given, standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("nvfp4: interrupted", err=True)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it flushes at exit
        return BROKEN_PIPE
    except (ValueError, TypeError, RuntimeError, OSError, ImportError) as error:
        if os.environ.get(TRACEBACK):
            raise
        _show_error(error, "--json" in given)
        return FAILED
    return int(status or 0)


def _show_error(error: Exception, as_json: bool) -> None:
    text = " ".join(str(error).split()) or type(error).__name__
    if as_json:
        click.echo(json.dumps({"error": text, "type": type(error).__name__}), err=True)
    else:
        click.echo(f"nvfp4: {text}", err=True)


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: object = None,
    line: str | None = None,
) -> None:  # fmt: skip
    """What a user should know; warnings of libraries to their callers are kept back."""
    if issubclass(category, UserWarning) and {"nvfp4_tensor", "nvfp4_cli"} & set(Path(filename).parts):
        click.echo(f"nvfp4: warning: {message}", err=True)
