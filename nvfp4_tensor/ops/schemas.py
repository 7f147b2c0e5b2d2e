"""Register an op. Its schema is derived from the signature of its plain-torch implementation.

C++ registers kernels for CPU and CUDA with the same schemas, and the dispatcher chooses. Exported programs contain the
schemas as text, so a test compares them with ``test/data/op_schemas.txt``.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias, TypeVar

import torch

from nvfp4_tensor._compat.exports import check_not_in_onnx

_Function = TypeVar("_Function", bound=Callable[..., object])

library = torch.library.Library("nvfp4", "DEF")

SymInt: TypeAlias = int
"""An int that may be symbolic under torch.compile. A plain ``int`` in a schema specializes the graph to its value."""

_SCHEMA_TYPES = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "Sequence[Tensor]": "Tensor[]",
    "SymInt": "SymInt",
    "bool": "bool",
    "float": "float",
    "int": "int",
    "torch.dtype": "ScalarType",
}
"""Python annotations to schema types. ``torch.library.infer_schema`` supports only SymInt and no names of results."""

_parameters: dict[str, dict[str, inspect.Parameter]] = {}

plain = types.SimpleNamespace()
"""The plain-torch implementation of each op, by its name."""


def op(
    *,
    returns: str = "",
    mutates_args: Sequence[str] = (),
    tags: Sequence[torch.Tag] = (),
    is_fake: bool = False,
) -> Callable[[_Function], _Function]:
    """Define ``torch.ops.nvfp4.NAME`` from a function of that name, which runs on devices without a native kernel.

    Args:
        returns: names of the results, such as "qdata, scale", if the op returns a tuple. An op annotated with None
            returns nothing.
        mutates_args: arguments that the op modifies in place.
        tags: in addition to ``pt2_compliant_tag``.
        is_fake: the function is its own fake implementation: it runs only operators that have one, on whole tensors.
    """

    def register(function: _Function) -> _Function:
        name = function.__name__
        _parameters[name] = dict(inspect.signature(function).parameters)
        schema = _schema(name, returns, mutates_args, inspect.signature(function).return_annotation == "None")
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
        library.impl(name, function, "CompositeExplicitAutograd")
        setattr(plain, name, function)
        if is_fake:
            fake(name)(function)
        return function

    return register


def _schema(name: str, returns: str, mutates_args: Sequence[str], returns_nothing: bool) -> str:
    alias = {argument: f"Tensor({chr(ord('a') + i)}!)" for i, argument in enumerate(mutates_args)}
    arguments = []
    for argument, parameter in _parameters[name].items():
        kind = _SCHEMA_TYPES[parameter.annotation].replace("Tensor", alias.get(argument, "Tensor"))
        default = "" if parameter.default is parameter.empty else f"={parameter.default}"
        arguments.append(f"{kind} {argument}{default}")
    results = "(" + ", ".join(f"Tensor {result}" for result in returns.split(", ")) + ")" if returns else "Tensor"
    if returns_nothing:
        results = "()"
    return f"{name}({', '.join(arguments)}) -> {results}"


def fake(*names: str) -> Callable[[_Function], _Function]:
    """Register the fake implementation of ops: a function whose parameters are a subset of the ops' arguments."""

    def register(function: _Function) -> _Function:
        for name in names:
            torch.library.register_fake(f"nvfp4::{name}", _bind(name, function, _parameters[name]), lib=library)
        return function

    return register


def _bind(
    name: str, function: Callable[..., object], parameters: dict[str, inspect.Parameter]
) -> Callable[..., object]:
    wanted = list(inspect.signature(function).parameters)
    assert set(wanted) <= set(parameters), f"{wanted} of {list(parameters)}"
    defaults = {name: parameter.default for name, parameter in parameters.items()}

    def call(*args: object, **kwargs: object) -> object:
        # The dispatcher has checked the arguments, and omits trailing ones that equal their defaults.
        check_not_in_onnx()
        given = {**defaults, **dict(zip(parameters, args, strict=False)), **kwargs}
        _check_devices(name, given.values())
        return function(*(given[name] for name in wanted))

    return call


def _check_devices(name: str, arguments: Iterable[object]) -> None:
    """Raise if only some tensors are on the meta device: results on another one would be memory without values."""
    listed = [t for a in arguments for t in (a if isinstance(a, list | tuple) else (a,))]
    devices = [t.device.type for t in listed if isinstance(t, torch.Tensor)]
    if devices and devices[0] != "meta" and "meta" in devices:
        raise RuntimeError(f"{name} takes tensors on one device, got {devices[0]} and meta")
