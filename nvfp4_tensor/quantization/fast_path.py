"""Disable torch's fast path of transformer encoders, which reads the weights of linears without calling them.

``nn.TransformerEncoderLayer`` uses the fast path in eval mode without gradients, unless one of its modules has a hook
or one of its weights has a class with ``__torch_function__``, such as NVFP4Tensor. ``nn.TransformerEncoder`` checks
only the weights of its first layer before it converts a padded batch to a nested tensor, which all layers then
receive: see :mod:`nvfp4_tensor.dispatch.nested`.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from nvfp4_tensor._compat.pickles import pin


@functools.partial(pin, loadable=False)
def _no_fast_path(linear: nn.Module, args: Any) -> None:
    """Do nothing: the presence of a hook disables the fast path."""


def keep_called(linear: nn.Linear) -> None:
    """Disable the fast path for a linear whose forward does more than multiply by its weight."""
    linear.register_forward_pre_hook(_no_fast_path)


def release(linear: nn.Linear) -> None:
    """Undo :func:`keep_called`."""
    for key in [key for key, hook in linear._forward_pre_hooks.items() if hook is _no_fast_path]:
        del linear._forward_pre_hooks[key]
