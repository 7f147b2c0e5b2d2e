"""Import torchao without its messages, which do not concern users of this package."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

_LOGGERS = ("torchao", "torch.utils._pytree")
"""Loggers that write while torchao is imported: about missing extensions, and deprecations in its own code."""


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Suppress warnings, and messages below errors from these loggers and their children."""
    levels = {logger: logger.level for logger in map(logging.getLogger, _LOGGERS)}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
