"""A JSON file next to the weights with the scales that a format cannot store, because 1 / (1 / x) can differ from x.

In a folder it is ``nvfp4_tensor.json``; for ``model.gguf`` it is ``model.nvfp4_tensor.json``. Other libraries ignore
it. Values that no longer match the weights are not used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nvfp4_tensor.checkpoints.io.safetensors import read_json, write_json
from nvfp4_tensor.checkpoints.parts import LARGEST, LinearParts

SIDECAR = "nvfp4_tensor.json"
_MAY_BE_SET = ("divisor", "input_divisor", "per_tensor_scale", "input_scale", "input_amax")


def sidecars_of(path: Path) -> list[Path]:
    """Return the possible paths of the sidecar of a folder or file. The first one that exists is used."""
    return [path / SIDECAR] if path.is_dir() else [path.with_suffix(f".{SIDECAR}"), path.parent / SIDECAR]


def check_sidecar(path: Path) -> Path:
    """Return the path of the sidecar for a file that will be written.

    Raises:
        ValueError: the path exists.
    """
    file = path.with_suffix(f".{SIDECAR}")
    if file.exists():
        raise ValueError(f"{file} already exists, and belongs to another {path.name}: remove it first")
    return file


def read_factors(path: Path) -> dict[str, dict[str, Any]]:
    """Read the sidecar of a checkpoint: values by weight, {} if there is no sidecar.

    Raises:
        ValueError: the sidecar is invalid.
    """
    file = next((file for file in sidecars_of(path) if file.exists()), None)
    if file is None:
        return {}
    factors = read_json(file).get("factors")
    fits = isinstance(factors, dict) and all(
        isinstance(each, dict) and set(each) <= set(_MAY_BE_SET) and all(_is_numbers(v) for v in each.values())
        for each in factors.values()
    )
    if not fits:
        raise ValueError(f"{file}: expected factors by tensor name, found {json.dumps(factors)[:80]}")
    assert isinstance(factors, dict)
    return factors


def write_factors(file: Path, factors: Mapping[str, Any]) -> None:
    """Write a sidecar, unless there are no factors."""
    if factors:
        write_json(file, {"version": 1, "factors": dict(sorted(factors.items()))})


def lost_factors(parts: LinearParts, *, stores_divisors: bool) -> dict[str, Any]:
    """Return the scales that would change by a bit when the file is read again.

    stores_divisors: whether the format stores the inverse of per-tensor scales.
    """
    if not stores_divisors:
        lost = {
            "divisor": _unless_inverse(parts.divisor, parts.per_tensor_scale),
            "input_divisor": _unless_inverse(parts.input_divisor, parts.input_scale),
        }
    else:
        lost = {
            "per_tensor_scale": _unless_inverse(parts.per_tensor_scale, parts.weight_divisor()),
            "input_scale": _unless_inverse(parts.input_scale, parts.activation_divisor()),
        }
    amax = parts.activation_amax()
    if amax is not None and parts.input_scale is not None and not torch.equal(parts.input_scale * LARGEST, amax):
        lost["input_amax"] = amax
    return {key: value.tolist() for key, value in lost.items() if value is not None}


def with_factors(parts: LinearParts, values: Mapping[str, Any]) -> LinearParts:
    """Return the parts with the values of the sidecar, or of :class:`Origin`, that match the file or the model."""
    factors = {key: torch.tensor(value, dtype=torch.float32) for key, value in values.items()}
    for scale, divisor in (("per_tensor_scale", "divisor"), ("input_scale", "input_divisor")):
        for value, inverse in ((scale, divisor), (divisor, scale)):
            kept, stored = factors.get(value), getattr(parts, inverse)
            if kept is not None and stored is not None and torch.equal(kept.reciprocal(), stored):
                parts = parts.replace(**{value: kept})
    return parts.replace(input_amax=factors["input_amax"]) if "input_amax" in factors else parts


def _unless_inverse(value: Tensor | None, stored: Tensor | None) -> Tensor | None:
    """Return ``value``, or None if it is the inverse of ``stored``."""
    return None if value is None or stored is None or torch.equal(stored.reciprocal(), value) else value


def _is_numbers(value: object) -> bool:
    """Return whether ``value`` is a float or an array of floats."""
    try:
        return torch.tensor(value, dtype=None).is_floating_point()
    except (TypeError, ValueError, RuntimeError):  # other types, or ragged lists
        return False
