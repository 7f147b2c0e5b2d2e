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
    """Warnings, and log records of torchao's import below errors, are dropped inside."""
    loggers = [logging.getLogger(name) for name in _SPEAKERS]

    def is_error(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    for logger in loggers:
        logger.addFilter(is_error)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_error)
