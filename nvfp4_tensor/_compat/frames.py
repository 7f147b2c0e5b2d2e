"""Find which of torch's functions called a hook, because some do next what NVFP4 weights do not support.

torch passes its hooks nothing about the caller. Inspecting the stack lets a hook raise a clear error in time.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any

_MAX_DEPTH = 32
"""Number of callers that are inspected."""


def caller_frame_locals(function: str, file: str, depth: int | None = _MAX_DEPTH) -> Mapping[str, Any] | None:
    """Return the locals of the nearest caller ``function`` in a file whose path ends with ``file``, or None.

    depth: the number of callers that are inspected, by default few; None for all.
    """
    frame = sys._getframe(1).f_back
    while frame is not None and depth != 0:
        if frame.f_code.co_name == function and frame.f_code.co_filename.endswith(file):
            return frame.f_locals
        frame, depth = frame.f_back, None if depth is None else depth - 1
    return None


_PACKAGES = (
    "accelerate",
    "contextlib",
    "copy",
    "diffusers",
    "nvfp4_tensor",
    "peft",
    "torch",
    "torchao",
    "transformers",
)


def user_level() -> int:
    """Return the ``stacklevel`` with which the caller warns at the line of the user, outside of these packages."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _PACKAGES:
        frame, level = frame.f_back, level + 1
    return level


def warn_user(message: str) -> None:
    """Warn at the line of the user."""
    warnings.warn(message, stacklevel=user_level())
