"""The command line ``nvfp4``, one module per command.

The package is separate from nvfp4_tensor, whose import imports torch. A command imports nvfp4_tensor when it runs, so
help, completion and errors about arguments take a tenth of a second.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import click

from nvfp4_cli import compare, completion, convert, demo, generate, info, inspect, quantize
from nvfp4_cli.wording import in_options

TRACEBACK = "NVFP4_TRACEBACK"
"""An environment variable: if it is set, errors are raised with their traceback."""

FAILED, INTERRUPTED, BROKEN_PIPE = 1, 130, 141


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}, no_args_is_help=True)
@click.version_option(package_name="nvfp4-tensor", prog_name="nvfp4")
def nvfp4() -> None:
    """Quantize, convert, inspect, compare and run NVFP4 checkpoints.

    \b
    nvfp4 quantize Llama-3.2-1B Llama-3.2-1B-NVFP4 --four-over-six
    nvfp4 inspect Llama-3.2-1B-NVFP4 --html report.html
    nvfp4 compare Llama-3.2-1B Llama-3.2-1B-NVFP4 --text sample.txt
    nvfp4 convert Llama-3.2-1B-NVFP4 model.gguf --to gguf
    nvfp4 generate Llama-3.2-1B-NVFP4 "Why is the sky blue?"

    Exit status: 0 success, 1 failure (stderr says why), 2 wrong arguments, 130 interrupted.
    """


for command in (
    quantize.quantize, convert.convert, inspect.inspect, compare.compare, generate.generate, generate.chat, info.info,
    info.selftest, demo.demo, completion.completion,
):  # fmt: skip
    nvfp4.add_command(command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0 success, 1 failure, 2 wrong arguments, 130 interrupted.

    ValueError, TypeError, RuntimeError, OSError and ImportError, which a user can fix, are printed as one line on
    stderr, or with ``--json`` as a JSON object. Any other exception is a bug and keeps its traceback.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    warnings.showwarning = _show_warning
    try:
        status = nvfp4.main(given, standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt) as error:
        what = str(error.__cause__ or error)  # click raises Abort from a KeyboardInterrupt
        click.echo(f"nvfp4: interrupted{': ' if what else ''}{in_options(what)}", err=True)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python's flush at exit fails again
        return BROKEN_PIPE
    except (ValueError, TypeError, RuntimeError, OSError, ImportError) as error:
        if os.environ.get(TRACEBACK):
            raise
        _show_error(error, "--json" in given)
        return FAILED
    return int(status or 0)


def _show_error(error: Exception, as_json: bool) -> None:
    kind = type(error).__name__
    text = in_options(" ".join(str(error).split())) or kind
    click.echo(json.dumps({"error": text, "type": kind}) if as_json else f"nvfp4: {text}", err=True)


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: object = None,
    line: str | None = None,
) -> None:  # fmt: skip
    """Print our own warnings; drop those that libraries address to their callers."""
    if issubclass(category, UserWarning) and {"nvfp4_tensor", "nvfp4_cli"} & set(Path(filename).parts):
        click.echo(f"nvfp4: warning: {in_options(str(message))}", err=True)
