"""Which of torch's functions a hook of ours was called by: for what they do next, and NVFP4 weights cannot.

torch hands its hooks no more than their arguments; to look up the stack is what lets us refuse in time and in words.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

_NEAR = 16
"""How many callers are looked at."""


def caller_frame_locals(function: str, file: str) -> Mapping[str, Any] | None:
    """The local variables of the nearest caller of that name, in a file whose path ends so; None if there is none."""
    frame = sys._getframe(1).f_back
    for _ in range(_NEAR):
        if frame is None:
            return None
        if frame.f_code.co_name == function and frame.f_code.co_filename.endswith(file):
            return frame.f_locals
        frame = frame.f_back
    return None
