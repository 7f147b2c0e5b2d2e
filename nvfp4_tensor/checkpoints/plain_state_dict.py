"""Convert state dicts to plain tensors and back, for distributed checkpoints, safetensors and other libraries.

Names and bytes are ModelOpt's: ``weight`` (uint8), ``weight_scale`` (float8_e4m3fn, in the order of the weight) and
``weight_scale_2`` (float32). Two tensors are additions: ``weight_settings`` (JSON as uint8) has the spec and the dtype
that the weight decodes to, and ``input_amax`` (float32 0-d) has a static activation amax.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nvfp4_tensor.checkpoints.formats.modelopt import keys_of
from nvfp4_tensor.checkpoints.io.safetensors import parse_json
from nvfp4_tensor.checkpoints.parts import LARGEST, LinearParts, check_scales, tensor_of
from nvfp4_tensor.dispatch.fp8 import FP8Spec, FP8Tensor
from nvfp4_tensor.numerics.choices import FP8Activations, ProductBackend
from nvfp4_tensor.numerics.layout import HIGH_PRECISION_DTYPES
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.tensor.fp8 import E4M3
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor

_SCALES = ("scale", "per_tensor_scale")


def to_plain(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict with every NVFP4Tensor and FP8Tensor as plain tensors. :func:`from_plain` is the inverse.

    Other values are unchanged. Codes are shared, not copied.

    Example::

        safetensors.torch.save_file(checkpoints.to_plain(model.state_dict()), "model.safetensors")
        state = checkpoints.from_plain(safetensors.torch.load_file("model.safetensors"))
        model.load_state_dict(state, assign=True)
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"to_plain takes a state dict, model.state_dict(), not a {type(state_dict).__name__}")
    plain: dict[str, Any] = {}
    for name, value in state_dict.items():
        if not isinstance(value, NVFP4Tensor | FP8Tensor):
            plain[name] = value
            continue
        weight, keys = value.detach(), part_names(name)
        settings = torch.frombuffer(bytearray(json.dumps(_settings(weight)).encode()), dtype=torch.uint8)
        if isinstance(weight, FP8Tensor):
            parts = {"scale": weight.scale, "settings": settings, "input_scale": weight.input_scale}
        else:
            parts = {
                "scale": weight.unswizzled_scale(), "per_tensor_scale": weight.per_tensor_scale, "settings": settings,
                "input_amax": weight.activation_amax,
            }  # fmt: skip
        plain[name] = weight.qdata
        plain |= {keys[part]: tensor for part, tensor in parts.items() if tensor is not None}
    return plain


def from_plain(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Invert :func:`to_plain`. Weights without settings, as in ModelOpt state dicts, get plain specs and bfloat16.

    Raises:
        ValueError: tensors of a weight are missing or do not match; the message has its name.
    """
    weights = {name for name in state_dict if any(keys_of(name)[key] in state_dict for key in _SCALES)}
    parts = {key for name in weights for key in part_names(name).values()}
    state = {}
    for name, value in state_dict.items():
        if name in weights:
            read, kind = (_fp8, "FP8") if value.dtype == E4M3 else (_nvfp4, "NVFP4")
            try:
                state[name] = read(name, state_dict)
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{name}: not an {kind} weight: {error}") from None
        elif name not in parts:
            state[name] = value
    return state


def part_names(name: str) -> dict[str, str]:
    """Return the names of the tensors of a weight. Its codes have the name of the weight itself."""
    keys = keys_of(name)
    stem = keys["scale"].removesuffix("weight_scale")
    return {**keys, "settings": f"{stem}weight_settings", "input_amax": f"{stem}input_amax"}


def _settings(weight: NVFP4Tensor | FP8Tensor) -> dict[str, Any]:
    dtype = str(weight.orig_dtype).removeprefix("torch.")
    if isinstance(weight, FP8Tensor):
        kind = None if weight.spec.activations is None else weight.spec.activations.name
        return {"fp8": weight.spec.block, "activations": kind, "dtype": dtype, "transposed": weight.transposed}
    return {
        "columns": weight.columns,
        "dtype": dtype,
        "spec": weight.spec.to_dict(),
        "activation_spec": None if weight.activation_spec is None else weight.activation_spec.to_dict(),
        "product_backend": weight.product_backend.name,
        "transposed": weight.transposed,
    }


def _nvfp4(name: str, state_dict: Mapping[str, Any]) -> NVFP4Tensor:
    keys = part_names(name)
    if missing := [keys[key] for key in _SCALES if keys[key] not in state_dict]:
        raise ValueError(f"{' and '.join(missing)} missing")
    settings = _read_settings(state_dict.get(keys["settings"]))
    input_scale, activation = state_dict.get(keys["input_scale"]), settings.get("activation_spec")
    activation_spec = QuantizeSpec(**activation) if activation else QuantizeSpec() if input_scale is not None else None
    dtype = getattr(torch, settings.get("dtype", "bfloat16"))
    if dtype not in HIGH_PRECISION_DTYPES:
        raise ValueError(f"dtype {dtype}")
    qdata, per_tensor_scale = state_dict[name], state_dict[keys["per_tensor_scale"]]
    input_scale = None if input_scale is None else input_scale.reshape(())
    parts = LinearParts(
        qdata=qdata,
        scale=state_dict[keys["scale"]],
        per_tensor_scale=per_tensor_scale.reshape(()) if per_tensor_scale.numel() == 1 else per_tensor_scale,
        columns=settings.get("columns", qdata.shape[-1] * 2),
        quantizes_activations=activation_spec is not None,
    )
    if not settings:  # with settings, the weight is ours, and its scales may be NaN
        check_scales(parts.replace(input_scale=input_scale))
    elif not per_tensor_scale.is_meta and (per_tensor_scale < 0).any():
        raise ValueError("a negative per-tensor scale")
    spec = QuantizeSpec(**settings["spec"]) if "spec" in settings else None
    weight = tensor_of(parts, dtype, spec=spec, activation_spec=activation_spec)
    amax = state_dict.get(keys["input_amax"], None if input_scale is None else input_scale * LARGEST)
    return weight._replace(
        per_tensor_scale=per_tensor_scale if "spec" in settings else weight.per_tensor_scale,
        activation_amax=amax,
        product_backend=ProductBackend[settings.get("product_backend", "AUTO")],
        transposed=bool(settings.get("transposed", False)),
    )


def _fp8(name: str, state_dict: Mapping[str, Any]) -> FP8Tensor:
    """Return a weight in FP8; one without settings has a scale per tensor."""
    keys = part_names(name)
    settings, static = _read_settings(state_dict.get(keys["settings"])), state_dict.get(keys["input_scale"])
    kind = settings.get("activations", None if static is None else FP8Activations.TENSOR)
    rows, columns = settings.get("fp8", (0, 0))
    spec = FP8Spec((rows, columns), FP8Activations.or_none(kind))
    codes, scale = state_dict[name], state_dict[keys["scale"]]
    return FP8Tensor(
        codes, scale.reshape(spec.scale_shape(codes.shape)), spec, getattr(torch, settings.get("dtype", "bfloat16")),
        bool(settings.get("transposed")), None if static is None else static.reshape(()),
    )  # fmt: skip


def _read_settings(data: Tensor | None) -> dict[str, Any]:
    settings = {} if data is None else parse_json(bytes(data.cpu().tolist()))
    if not isinstance(settings, dict):
        raise ValueError(f"settings {settings!r}")
    return settings
