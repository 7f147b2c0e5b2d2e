"""The callers of a handler or hook, which torchao, peft, transformers and torch call without telling for whom.

torchao's ``quantize_`` passes a handler one module at a time. To check all modules before the first one changes, to
find tied weights and to reach experts, a handler needs the model and the filter, which are read from the frame of
``quantize_``. ``quantize_model`` and ``calibrate`` need no frame. What follows warns of what the user hardly means.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import Tensor, nn
from torchao.core.config import AOBaseConfig
from torchao.quantization import quantize_

from nvfp4_tensor._compat.frames import caller_frame_locals, warn_user
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor

Filter = Callable[[nn.Module, str], bool]
T = TypeVar("T")
_STARTED = "nvfp4 modules, and what they started"


def once_per_call(module: nn.Module, config: AOBaseConfig, start: Callable[[nn.Module, list[nn.Module], bool], T]) -> T:
    """Return what ``start`` returned at the first module of the current call of quantize_, before any has changed.

    start: called with the model, the modules of the call in order, and whether these are all that the call has. If not,
        there is only one: the handler was called alone (the module is the model), or by one of several configs.
    """
    code = quantize_.__code__
    call: Any = caller_frame_locals(code.co_name, code.co_filename, depth=None) or {}
    model: nn.Module = call.get("model", module)
    filter_fn: Filter | None = call.get("filter_fn")
    if filter_fn is None or call["config"] is not config:  # but one of several configs, chosen by module names
        return start(model, [module], False)
    if _STARTED not in call or module not in call[_STARTED][0]:
        chosen = list(dict.fromkeys((*selected(model, filter_fn), module)))
        warn_of_dense_attention(model, filter_fn)
        call[_STARTED] = set(chosen), start(model, chosen, True)  # in the frame, which ends with the call
    return call[_STARTED][1]  # type: ignore[no-any-return]


def selected(module: nn.Module, filter_fn: Filter, name: str = "") -> Iterator[nn.Module]:
    """Yield the modules that quantize_ passes to a handler, in order. It does not descend into selected modules."""
    if filter_fn(module, name):
        yield module
        return
    for child_name, child in module.named_children():
        yield from selected(child, filter_fn, f"{name}.{child_name}" if name else child_name)


def warn_of_dense_attention(model: nn.Module, filter_fn: Filter) -> None:
    """Warn of nn.MultiheadAttention that stays dense, if the filter would select an nn.Linear in place of out_proj.

    Its forward passes the weights to one function and calls no linear; torchao's default filter excludes out_proj.
    """
    dense: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.MultiheadAttention):
            continue
        last, path = module.out_proj, f"{name}.out_proj".lstrip(".")
        plain = nn.Linear(last.in_features, last.out_features, device="meta")
        if type(last.weight.data) is Tensor and filter_fn(plain, path) and not filter_fn(last, path):
            dense.append(name or type(model).__name__)
    if dense:
        warn_user(
            f"left dense, because nn.MultiheadAttention calls no nn.Linear: all weights of {', '.join(dense)}. To "
            "quantize them, write attention with one nn.Linear per projection; a filter_fn that excludes their names "
            "silences this warning"
        )


_trained: weakref.WeakSet[nn.Module] = weakref.WeakSet()

_MERGES = (
    ("merge_adapter", "unmerge_adapter", "peft/tuners/tuners_utils.py"),
    ("fuse_lora", "unfuse_lora", "diffusers/loaders/peft.py"),
)


def warn_of_merge() -> None:
    """Warn if peft or diffusers merges adapters into NVFP4 weights to remove them again later."""
    for merge, undo, file in _MERGES:
        if caller_frame_locals(merge, file) is not None:
            warn_user(
                f"{merge} rounds the sums to NVFP4, and {undo} rounds again: it does not bring the weights back. Keep "
                "the adapters apart, or merge for good by nvfp4_tensor.training.merge_lora"
            )


def warn_of_trainer() -> None:
    """Warn if the Trainer of transformers trains a model whose weights quantize_ has frozen: once for each model.

    A model with adapters has other frozen parameters, and so has one whose user chose what to train.
    """
    model = (caller_frame_locals("training_step", "transformers/trainer.py") or {}).get("model")
    if not isinstance(model, nn.Module) or model in _trained:
        return
    _trained.add(model)
    parameters = list(model.parameters())
    frozen = [p for p in parameters if not p.requires_grad]
    if frozen and all(isinstance(p, NVFP4Tensor) for p in frozen):
        share = sum(p.numel() for p in frozen) / sum(p.numel() for p in parameters)
        warn_user(
            f"the NVFP4 weights of {type(model).__name__}, {share:.0%} of its parameters, are frozen, and the Trainer "
            "trains only the others: add adapters (peft.get_peft_model), train before quantize_ "
            "(NVFP4TrainingConfig), or train NVFP4 weights by training.to_nvfp4_parameters and NVFP4AdamW"
        )


def warn_of_dense_weight(weight: Any, new: Any) -> None:
    """Warn if load_state_dict(assign=True) replaces an NVFP4 weight by a dense one."""
    if isinstance(weight, NVFP4Tensor) and isinstance(new, Tensor) and not isinstance(new, NVFP4Tensor):
        warn_user(
            f"load_state_dict(assign=True) replaces NVFP4 weights by dense ones of {new.dtype}: leave assign out to "
            "quantize them, or quantize the model again afterwards"
        )
