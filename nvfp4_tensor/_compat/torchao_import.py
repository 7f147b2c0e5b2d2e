"""Importing torchao without what it prints: lines that a user of this package can do nothing about."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

_SPEAKERS = ("torchao", "torch.utils._pytree")
"""Loggers that speak while torchao is imported: of extensions not loaded, of deprecations in its own code."""


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Warnings, and what these loggers and those below them say short of errors, are dropped inside."""
    levels = {logger: logger.level for logger in map(logging.getLogger, _SPEAKERS)}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
