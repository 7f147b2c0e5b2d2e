"""fbgemm's FP4 product, from a package that need not be there: found, loaded, and accounted for.

``f4f4bf16(XQ, WQ, x_scale, w_scale, *, global_scale)`` is XQ @ WQ^T in bfloat16 on the tensor cores of compute
capability 10: codes (M, K/2) and (N, K/2), two a byte; e4m3 block scales in the 128x4 order, which is how an
:class:`NVFP4Tensor` stores them; one float32 that multiplies the sums. Without a global_scale the op would read the
scales as MXFP4's. It comes with fbgemm-gpu-genai (``torch.ops.fbgemm``; fbgemm-gpu itself has no FP4 product) and with
MSLK, its successor (``torch.ops.mslk``).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import torch

_PACKAGES = {"fbgemm": ("fbgemm_gpu.experimental.gen_ai", "fbgemm-gpu-genai"), "mslk": ("mslk", "mslk-cuda")}
"""Namespace of the op: the module whose import registers it, the distribution that brings it."""


@dataclasses.dataclass(frozen=True)
class Product:
    """The op, or why there is none; ``str`` is what :func:`info` shows."""

    op: Callable[..., torch.Tensor] | None
    package: str
    reason: str
    """Why the op is not there; empty where it is."""

    def __str__(self) -> str:
        return f"f4f4bf16 of {self.package}" if self.op is not None else self.reason


@functools.cache
def product() -> Product:
    """f4f4bf16 of the first package that has it: imports that package, once."""
    reasons = []
    for namespace, (module, distribution) in _PACKAGES.items():
        found = _from_package(namespace, module, distribution)
        if found.op is not None:
            return found
        if found.reason:
            reasons.append(found.reason)
    return Product(None, "", "; ".join(reasons) or "not installed")


def _from_package(namespace: str, module: str, distribution: str) -> Product:
    op = _registered(namespace)
    if op is None:
        try:
            if importlib.util.find_spec(module) is None:
                return Product(None, "", "")
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            absent = error.name is not None and module.startswith(error.name)
            return Product(None, "", "" if absent else f"{distribution} does not import: {error}")
        except Exception as error:  # its library was built for another torch, or for a GPU that is not here
            why = str(error.__cause__ or error).strip().splitlines()[0]
            return Product(None, "", f"{distribution} does not import: {why}")
        op = _registered(namespace)
    try:
        package = f"{distribution} {version(distribution)}"
    except PackageNotFoundError:
        package = f"torch.ops.{namespace}"
    if op is None:
        return Product(None, "", f"{package} has no f4f4bf16")
    return Product(op, package, "")


def _registered(namespace: str) -> Callable[..., torch.Tensor] | None:
    """The op, told in older versions, which do not take a global_scale as the sign of it, that the format is NVFP4."""
    op = getattr(getattr(torch.ops, namespace), "f4f4bf16", None)
    if op is None:
        return None
    arguments = {argument.name for argument in op.default._schema.arguments}
    return functools.partial(op, use_mx=False) if "use_mx" in arguments else op
