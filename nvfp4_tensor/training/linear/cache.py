"""What an eager linear need not quantize again: an input that a neighbour has had, and weights on request.

No counter of torch shows every write: ``t.data``, ``t.numpy()``, DLPack and kernels of others pass all of them. So an
input is shared only within an autograd graph, which relies on the same tensor not changing (its backward reads it), and
a weight's codes are kept only within :func:`reuse_weight_codes`, where the caller says that weights do not change.

Compiled graphs use neither: there AOTAutograd folds equal ops of one graph into one.
"""

from __future__ import annotations

import threading
import weakref
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from nvfp4_tensor.numerics.codes import Codes
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.training.linear.operands import Quantized

# --- weights ---------------------------------------------------------------------------------------------------------

_optimizer_steps = 0


def _count_step(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    """Fused optimizers write through raw pointers, and FSDP keeps version counters: a step is what changes weights."""
    global _optimizer_steps
    if not torch.compiler.is_compiling():  # a compiled step counts up the versions of what it writes
        _optimizer_steps += 1


register_optimizer_step_post_hook(_count_step)


def optimizer_steps() -> int:
    """How many steps optimizers have taken in this process."""
    return _optimizer_steps


class WeightCodes:
    """The codes of one weight, within :func:`reuse_weight_codes`."""

    def __init__(self) -> None:
        self._kept: _Weight | None = None  # one attribute: other threads see all of it, or nothing

    def get(self, weight: Tensor, spec: QuantizeSpec) -> Codes | None:
        """The codes of this weight, if they are here, and nothing shows that it has changed."""
        kept = self._kept
        if kept is None or kept.tensor is not weight or kept.key != _weight_key(weight, spec):
            return None
        return kept.operand

    def put(self, weight: Tensor, spec: QuantizeSpec, operand: Codes) -> None:
        """Keep these in place of the last."""
        self._kept = _Weight(weight, _weight_key(weight, spec), operand)


class _Weight(NamedTuple):
    tensor: Tensor
    key: tuple
    operand: Codes


def _weight_key(weight: Tensor, spec: QuantizeSpec) -> tuple:
    """What of a weight shows a change: an error of the caller, but one that costs nothing to see."""
    return _version(weight), weight.data_ptr(), weight.shape, weight.stride(), weight.dtype, spec, _optimizer_steps


def is_cacheable(weight: Tensor) -> bool:
    """Whether codes may outlive the call: not in a trace, nor in a capture, whose replays see other weights."""
    return not (_is_tracing() or _is_capturing(weight) or weight.is_inference() or weight.is_meta)


def _version(t: Tensor) -> int:
    return t._version


_OF_GRAPHS = FakeTensorMode, ProxyTorchDispatchMode, _CachingTorchDispatchMode, _CachedTorchDispatchMode
"""Modes whose ops have no values, go into a graph, or are counted by a selective checkpoint, which calls all of them
a second time and takes what it has saved by their order."""


def _is_tracing() -> bool:
    """Whether a call's ops belong to that call alone: codes made there are not for others, nor others' for it."""
    if torch.compiler.is_compiling():
        return True
    stack = _get_current_dispatch_mode_stack() if torch._C._len_torch_dispatch_stack() else []
    return any(isinstance(mode, _OF_GRAPHS) for mode in stack)


def _is_capturing(t: Tensor) -> bool:
    return t.is_cuda and torch.cuda.is_current_stream_capturing()


# --- inputs ----------------------------------------------------------------------------------------------------------


Pair: TypeAlias = "tuple[Quantized | None, Codes | None]"
"""x and x^T."""


class _Input(NamedTuple):
    tensor: weakref.ref[Tensor]
    storage: UntypedStorage
    """Held, so that another tensor cannot get the same address."""
    key: tuple
    users: weakref.WeakSet
    operands: Pair


class _Last(threading.local):
    entry: _Input | None = None


_last = _Last()
"""The last input quantized, as q, k and v get one tensor one after the other. It goes with that tensor."""


def shared_input(x: Tensor, key: tuple, user: object) -> Pair | None:
    """What another linear made of the same x, unchanged since, by the same ``key``.

    Each user takes it once: the second call of one with the same tensor is another step.
    """
    entry = _last.entry
    if entry is None or entry.tensor() is not x or entry.key != _input_key(x, key) or user in entry.users:
        return None
    entry.users.add(user)
    return entry.operands


def share_input(x: Tensor, key: tuple, user: object, operands: Pair) -> None:
    """Keep what was made of x for the linears that come next, as long as x lives."""
    users: weakref.WeakSet = weakref.WeakSet([user])
    _last.entry = _Input(weakref.ref(x, _forget), x.untyped_storage(), _input_key(x, key), users, operands)


def _forget(ref: weakref.ref) -> None:
    if _last.entry is not None and _last.entry.tensor is ref:
        _last.entry = None


def _input_key(x: Tensor, key: tuple) -> tuple:
    return _version(x), x.data_ptr(), x.shape, x.stride(), _optimizer_steps, _is_capturing(x), *key


def is_shareable(x: Tensor) -> bool:
    """Whether x is what an autograd graph has computed, and relies on until its backward.

    A leaf is its owner's, who may write it in ways that no counter shows: as an environment fills its one buffer.
    """
    if _is_tracing() or x.is_meta or type(x) is not Tensor:
        return False
    return torch.is_grad_enabled() and x.grad_fn is not None
