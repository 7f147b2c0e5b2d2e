"""Reuse quantized operands in eager mode: an input that several linears share, and weights within reuse_weight_codes.

torch's version counters do not detect every write: ``t.data``, ``t.numpy()``, DLPack and foreign kernels bypass them.
So an input's operands are shared only if an autograd graph already relies on the tensor not changing, because its
backward reads it. A weight's codes are cached only within :func:`reuse_weight_codes`, where the caller promises not to
change weights.

Compiled graphs use neither: AOTAutograd merges equal ops of one graph.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
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
    """Count optimizer steps, because version counters miss fused optimizers (raw pointers) and FSDP (restores them)."""
    global _optimizer_steps
    if not torch.compiler.is_compiling():  # a compiled step increments the version of the tensors that it writes
        _optimizer_steps += 1


register_optimizer_step_post_hook(_count_step)


def optimizer_steps() -> int:
    """Return how many optimizer steps have run in this process."""
    return _optimizer_steps


class WeightCodes:
    """The cached codes of one weight, within :func:`reuse_weight_codes`."""

    _kept: tuple[Tensor, UntypedStorage, tuple, Codes | None] | None = None
    """The weight, its storage, its key and its codes, in one attribute, so that other threads see a consistent entry.
    The storage is a reference, so that ``weight.data = ...`` cannot get the same address for new values."""

    def get(self, weight: Tensor, spec: QuantizeSpec, quantize: Callable[[], Codes | None]) -> Codes | None:
        """Return the codes of this weight; new ones if there are none or a change of the weight is detected."""
        kept, key = self._kept, _weight_key(weight, spec)
        if kept is None or kept[0] is not weight or kept[2] != key:
            with torch.inference_mode(False):  # so that a forward that trains can use them too
                self._kept = kept = weight, weight.untyped_storage(), key, quantize()
        return kept[3]


def _weight_key(weight: Tensor, spec: QuantizeSpec) -> tuple:
    """Return properties that change with most writes. A write breaks the caller's promise, but checking is cheap."""
    return weight._version, weight.data_ptr(), weight.shape, weight.stride(), weight.dtype, spec, _optimizer_steps


def is_cacheable(weight: Tensor) -> bool:
    """Whether codes may outlive the call: not in a trace, nor in a capture, whose replays see other weights."""
    return not (is_tracing() or _is_capturing(weight) or weight.is_inference() or weight.is_meta)


_TRACING_MODES = FakeTensorMode, ProxyTorchDispatchMode, _CachingTorchDispatchMode, _CachedTorchDispatchMode
"""Modes in which a call has to run all of its ops: tensors have no values, ops are recorded in a graph, or a selective
checkpoint runs the ops twice and matches them by their order."""


def is_tracing() -> bool:
    """Whether a call has to run all of its ops, and so can neither reuse codes nor provide them to other calls."""
    if torch.compiler.is_compiling():
        return True
    stack = _get_current_dispatch_mode_stack() if torch._C._len_torch_dispatch_stack() else []
    return any(isinstance(mode, _TRACING_MODES) for mode in stack)


def _is_capturing(t: Tensor) -> bool:
    return t.is_cuda and torch.cuda.is_current_stream_capturing()


# --- inputs ----------------------------------------------------------------------------------------------------------


Pair: TypeAlias = "tuple[Quantized | None, Codes | None]"
"""x and x^T."""


class _Input(NamedTuple):
    tensor: weakref.ref[Tensor]
    storage: UntypedStorage
    """A reference, so that no new tensor gets the same address."""
    key: tuple
    users: list[weakref.ref]
    """The linears that have used the operands."""
    operands: Pair


class _LastInput(threading.local):
    entry: _Input | None = None


_last = _LastInput()
"""The last quantized input, because q, k and v are called with one tensor in sequence. It is freed with that tensor."""


def shared_input(x: Tensor, key: tuple, user: object) -> Pair | None:
    """Return the operands that another linear made from the same, unchanged x with the same ``key``, or None.

    Each user can get them once, because its second call with the same tensor belongs to another step.
    """
    entry = _last.entry
    if entry is None or entry.tensor() is not x or entry.key != _input_key(x, key):
        return None
    if any([ref() is user for ref in entry.users]):
        return None
    entry.users.append(weakref.ref(user))
    return entry.operands


def share_input(x: Tensor, key: tuple, user: object, operands: Pair) -> None:
    """Keep the operands made from x for the linears that are called next, as long as x is alive."""
    users = [weakref.ref(user)]
    _last.entry = _Input(weakref.ref(x, _forget), x.untyped_storage(), _input_key(x, key), users, operands)


def _forget(ref: weakref.ref) -> None:
    if _last.entry is not None and _last.entry.tensor is ref:
        _last.entry = None


def _input_key(x: Tensor, key: tuple) -> tuple:
    return x._version, x.data_ptr(), x.shape, x.stride(), _optimizer_steps, _is_capturing(x), *key
