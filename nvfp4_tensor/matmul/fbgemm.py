"""Find and load fbgemm's FP4 product from an optional package.

``f4f4bf16(XQ, WQ, x_scale, w_scale, *, global_scale)`` is XQ @ WQ^T in bfloat16 on the tensor cores of compute
capability 10. Codes are (M, K/2) and (N, K/2), two per byte; e4m3 block scales are in the 128x4 order in which an
:class:`NVFP4Tensor` stores them; one float32 multiplies the sums. Without a global_scale the op interprets the scales
as MXFP4. It is in fbgemm-gpu-genai (``torch.ops.fbgemm``; fbgemm-gpu itself has no FP4 product) and with
MSLK, its successor (``torch.ops.mslk``).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import torch

_PACKAGES = {"fbgemm": ("fbgemm_gpu.experimental.gen_ai", "fbgemm-gpu-genai"), "mslk": ("mslk", "mslk-cuda")}
"""Namespace of the op: the module whose import registers it, and the distribution that contains it."""


class Product(NamedTuple):
    """The op, and what :func:`info` says of it: its package, or why there is none."""

    op: Callable[..., torch.Tensor] | None
    text: str


@functools.cache
def product() -> Product:
    """Return f4f4bf16 from the first package that has it, importing the package once."""
    reasons = []
    for namespace, (module, distribution) in _PACKAGES.items():
        found = _from_package(namespace, module, distribution)
        if found.op is not None:
            return found
        reasons += [found.text] if found.text else []
    return Product(None, "; ".join(reasons) or "not installed")


def _from_package(namespace: str, module: str, distribution: str) -> Product:
    op = _registered(namespace)
    if op is None:
        try:
            if importlib.util.find_spec(module) is None:
                return Product(None, "")
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            absent = error.name is not None and module.startswith(error.name)
            return Product(None, "" if absent else f"{distribution} does not import: {error}")
        except Exception as error:  # its library was built for another torch or GPU
            why = str(error.__cause__ or error).strip().splitlines()[0]
            return Product(None, f"{distribution} does not import: {why}")
        op = _registered(namespace)
    try:
        package = f"{distribution} {version(distribution)}"
    except PackageNotFoundError:
        package = f"torch.ops.{namespace}"
    return Product(op, f"{package} has no f4f4bf16" if op is None else f"f4f4bf16 of {package}")


def _registered(namespace: str) -> Callable[..., torch.Tensor] | None:
    """Return the op. Older versions need ``use_mx=False``, because global_scale does not imply NVFP4 there."""
    op = getattr(getattr(torch.ops, namespace), "f4f4bf16", None)
    if op is None:
        return None
    arguments = {argument.name for argument in op.default._schema.arguments}
    return functools.partial(op, use_mx=False) if "use_mx" in arguments else op
