"""The plan of a whole model: which matrices are quantized, which stay dense, why, and which share a per-tensor scale.

:func:`plan_matrices` plans from names, shapes and kinds alone, so that a model in memory, a model that is being loaded
and a folder of safetensors are planned by the same rules.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence

import torch

from nvfp4_tensor.numerics.layout import BLOCK, HIGH_PRECISION_DTYPES
from nvfp4_tensor.quantization.model_families import LEFT_DENSE, NOT_LINEAR
from nvfp4_tensor.quantization.names import groups_of, is_matched, some

FEW_ROWS = BLOCK
"""Weights with fewer rows stay dense: they are routers, gates and scores, and hold a negligible share of a model."""

ROWS_PER_COLUMN = 32
"""So do weights with fewer rows than one for each 32 columns."""


class Kind(enum.Enum):
    """What a matrix is: the weight (N, K) of a linear, the weights (E, N, K) of experts, or something else."""

    LINEAR = "linear"
    EXPERTS = "experts"
    OTHER = "other"


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A parameter with two or more dimensions, as a plan sees it.

    Attributes:
        name: the name of the parameter, for instance ``model.layers.0.mlp.down_proj.weight``.
        shape: (N, K) of a linear, (E, N, K) of experts, whatever the memory layout is.
        dtype: its dtype.
        kind: what it is.
        note: why it cannot be quantized, or "".
        tied: names of other parameters that are the same tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: Kind = Kind.LINEAR
    note: str = ""
    tied: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class PlannedMatrix(Matrix):
    """A matrix, and what happens to it.

    Attributes:
        is_quantized: whether it becomes NVFP4.
        reason: why it stays dense, or what it is if it is quantized.
        group: the names of the weights with which it shares a per-tensor scale, including its own.
    """

    is_quantized: bool = False
    reason: str = ""
    group: tuple[str, ...] = ()

    @property
    def is_unfit(self) -> bool:
        """Whether its size or dtype, and not a rule, leaves it dense."""
        return self.reason.endswith(_UNFIT)


class ModelPlan(dict[str, PlannedMatrix]):
    """The matrices of a model by name, each with its decision and the reason.

    ``print(plan)`` shows one row for equal matrices of all layers.
    """

    @property
    def quantized(self) -> tuple[str, ...]:
        """The names of the matrices that are quantized."""
        return tuple(name for name, each in self.items() if each.is_quantized)

    @property
    def dense(self) -> tuple[str, ...]:
        """The names of the matrices that stay dense."""
        return tuple(name for name, each in self.items() if not each.is_quantized)

    def __repr__(self) -> str:
        rows: Counter[tuple[str, ...]] = Counter()
        for name, each in self.items():
            pattern = re.sub(r"\.\d+(?=\.)", ".*", name)
            kind = "NVFP4" if each.is_quantized else "dense"
            rows[pattern, " x ".join(map(str, each.shape)), kind, each.reason] += 1
        cells = [("", "matrix", "shape", "", "reason"), *((f"{n} x", *row) for row, n in rows.items())]
        total = sum(_size(each) for each in self.values())
        share = sum(_size(each) for each in self.values() if each.is_quantized) / max(total, 1)
        return "\n".join(
            [*aligned(cells), f"{len(self.quantized)} of {len(self)} matrices quantized, {share:.1%} of elements"]
        )

    def left_dense(self) -> str:
        """Return what stays dense and why, one line for each reason, without what is no linear."""
        by_reason: dict[str, list[str]] = {}
        for name, each in self.items():
            if not each.is_quantized and not each.reason.startswith(_NO_LINEAR):
                by_reason.setdefault(each.reason, []).append(name.removesuffix(".weight"))
        return "\n".join(f"left dense ({reason}): {some(names)}" for reason, names in by_reason.items())

    def candidates(self) -> str:
        """Return which matrices there are, by their reason, for the message of an error."""
        return self.left_dense().replace("\n", "; ") or "it has no linear"


PARAMETER = "parameter of "
"""How the note begins of a matrix that a module multiplies by itself, for instance the experts of DBRX."""
_NO_LINEAR = "no linear"
_UNFIT = "cannot be NVFP4"


def plan_matrices(
    matrices: Sequence[Matrix],
    *,
    exclude: Collection[str] = (),
    include: Collection[str] = (),
    selected: Callable[[str], bool] | None = None,
    heads: Collection[str] = (),
    drafters: Collection[str] = (),
    where: str = "the model",
) -> ModelPlan:
    """Plan which matrices are quantized.

    By default these are all linears and experts in bfloat16, float16 or float32 whose columns are a multiple of 16,
    except output layers, routers, gates, drafters (MTP), adapters, encoders of images and audio
    (``model_families.LEFT_DENSE``), weights with fewer than 16 rows or one row for each 32 columns, and weights that
    something else shares. Linears that servers join are quantized together or not at all, and share a per-tensor scale.

    Args:
        matrices: the matrices of the model, each tensor once.
        exclude: patterns of names to leave dense, as in :func:`is_matched`.
        include: patterns of names to quantize although the rules leave them dense.
        selected: decides alone, in place of the rules, which weights are quantized, by their names.
        heads, drafters: names of output layers, and of the layers of a drafter, that their names do not show.
        where: the model or file, for messages.

    Raises:
        ValueError: a pattern matches no linear and no experts.
    """
    linears = {each.name: each for each in matrices if each.kind is Kind.LINEAR}
    _check_patterns((*exclude, *include), matrices, where)
    groups = groups_of(linears, linears)
    routers = _routers(matrices)

    def rule(each: Matrix) -> str:
        """The reason by which a matrix stays dense unless the caller includes it."""
        if each.name in heads:
            return "output layer"
        if each.name in drafters:
            return "layer of a drafter"
        if each.name in routers:
            return "router of experts"
        for reason, patterns in LEFT_DENSE.items():
            if is_matched(each.name, patterns):
                return reason
        if is_matched(each.name, NOT_LINEAR):
            return f"{_NO_LINEAR}: named like an embedding or norm"
        rows = sum(linears[name].shape[0] for name in groups.get(each.name, ())) or each.shape[0]
        if each.kind is Kind.LINEAR and (rows < FEW_ROWS or rows * ROWS_PER_COLUMN <= each.shape[-1]):
            return f"few rows ({rows} of {each.shape[-1]} columns)"
        return ""

    def rules_of(each: Matrix) -> str:
        """The first reason by any name of the tensor."""
        return next(filter(None, (rule(dataclasses.replace(each, name=name)) for name in (each.name, *each.tied))), "")

    rules = {name: rules_of(each) for name, each in linears.items()}

    def reason_of(each: Matrix) -> str:
        if each.kind is Kind.OTHER:
            return each.note if each.note.startswith(PARAMETER) else f"{_NO_LINEAR}: {each.note}"
        if each.note:
            return each.note
        names = (each.name, *each.tied)
        if any(is_matched(name, exclude) for name in names):
            return "excluded"
        if selected is not None and not all(selected(name) for name in names):
            return "not selected by filter_fn"
        if selected is None and not any(is_matched(name, include) for name in names):
            if reason := rules.get(each.name) or rules_of(each):
                return reason
            if inhibitor := next((name for name in groups.get(each.name, ()) if rules[name]), None):
                return f"servers join it with {inhibitor.removesuffix('.weight').rpartition('.')[2]}, which stays dense"
        return _unfit(each, any_columns=selected is not None)

    planned = {}
    for each in matrices:
        reason = reason_of(each)
        planned[each.name] = PlannedMatrix(
            **vars(each), is_quantized=not reason, reason=reason or each.kind.value, group=(each.name,)
        )
    quantized = [name for name in linears if planned[name].is_quantized]
    for name, group in groups_of(quantized, linears).items():
        planned[name] = dataclasses.replace(planned[name], group=group)
    return ModelPlan(planned)


def _check_patterns(patterns: Collection[str], matrices: Sequence[Matrix], where: str) -> None:
    names = [name for each in matrices if each.kind is not Kind.OTHER for name in (each.name, *each.tied)]
    for pattern in patterns:
        if not any(is_matched(name, [pattern]) for name in names):
            raise ValueError(f"{pattern!r} matches no linear of {where}, which has {some(names)}")


def _unfit(each: Matrix, any_columns: bool) -> str:
    """Return why NVFP4 cannot have the values of a matrix, or ""."""
    if each.dtype not in HIGH_PRECISION_DTYPES:
        return f"{str(each.dtype).removeprefix('torch.')} {_UNFIT}"
    if not all(each.shape):
        return f"an empty weight {_UNFIT}"
    if each.shape[-1] % BLOCK and not any_columns:
        return f"in files, columns that are not a multiple of {BLOCK} {_UNFIT}"
    return ""


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row of a table, its cells in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


_EXPERTS = re.compile(r"^(?P<module>.*?)\.?\bexperts\.(?P<index>\d+\.)?")


def _routers(matrices: Sequence[Matrix]) -> set[str]:
    """Return the weights with one row for each expert of the module that has them.

    The weights of shared experts and of latent projections can have as many rows; a router has a name without
    "expert" and "shared", and is the only matrix of its module if it is not the module itself.
    """
    counts: dict[str, int] = {}
    alone = Counter(each.name.rpartition(".")[0].rpartition(".")[0] for each in matrices)
    for each in matrices:
        if found := _EXPERTS.match(each.name):
            index = found["index"]
            count = int(index[:-1]) + 1 if index else (each.shape[0] if len(each.shape) == 3 else 0)
            counts[found["module"]] = max(counts.get(found["module"], 0), count)
    routers = set()
    for each in matrices:
        module = each.name.rpartition(".")[0]
        parent, _, leaf = module.rpartition(".")
        above, _, own = parent.rpartition(".")
        if "expert" in leaf + own or "shared" in leaf + own or len(each.shape) != 2:
            continue
        if each.shape[0] in (counts.get(parent), counts.get(above) if alone[parent] == 1 else None):
            routers.add(each.name)
    return routers


def _size(each: PlannedMatrix) -> int:
    return torch.Size(each.shape).numel()
