"""torch's fast path of transformer encoders, which reads the weights of linears and never calls them.

``nn.TransformerEncoderLayer`` takes it in evaluation without gradients, unless one of its modules has a hook or one of
its weights is of a class with ``__torch_function__``, as NVFP4Tensor is. ``nn.TransformerEncoder`` asks for the weights
of its first layer alone before it makes a nested tensor of a padded batch, which all layers get then: see
:mod:`nvfp4_tensor.dispatch.nested`.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from nvfp4_tensor._compat.pickles import pin


@functools.partial(pin, loadable=False)
def _no_fast_path(linear: nn.Module, args: Any) -> None:
    """A hook that is there to be seen."""


def keep_called(linear: nn.Linear) -> None:
    """Let no fast path read the plain weight of a linear whose forward does more than multiply by it."""
    linear.register_forward_pre_hook(_no_fast_path)


def release(linear: nn.Linear) -> None:
    """Undo :func:`keep_called`."""
    for key in [key for key, hook in linear._forward_pre_hooks.items() if hook is _no_fast_path]:
        del linear._forward_pre_hooks[key]
