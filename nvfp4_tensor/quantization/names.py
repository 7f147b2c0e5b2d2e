"""Names of parameters: patterns, groups of linears that servers join, and lists of names in messages."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager

from nvfp4_tensor.quantization.model_families import ALSO_CALLED, CONV1D, JOINED, JOINED_WHOLE, TRANSPOSED_LINEARS


@contextmanager
def refused_by_name(name: str) -> Iterator[None]:
    """Let the message of a TypeError or ValueError begin with the name of the module that it is about."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}" if name else str(error)) from None


def is_matched(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a pattern matches a parameter, or the module that it is the weight of.

    A pattern is an exact name, a name with wildcards ("*.down_proj", "model.layers.0.*"), or "re:" and a regular
    expression that matches from the start, as in compressed-tensors.

    Raises:
        ValueError: the text after "re:" is not a regular expression.
    """
    module = name.removesuffix(".weight")
    for pattern in patterns:
        if pattern.startswith("re:"):
            if _compiled(pattern[3:]).match(module):
                return True
        elif fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(module, pattern):
            return True
    return False


@functools.cache  # re keeps 512, fewer than a folder may have
def _compiled(expression: str) -> re.Pattern[str]:
    try:
        return re.compile(expression)
    except re.error as error:
        raise ValueError(f"'re:{expression}' is not a regular expression: {error}") from None


def _with_other_names(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return rows of the tables, each followed by the same row under its other names."""
    return [each for row in rows for each in dict.fromkeys([row, tuple(ALSO_CALLED.get(name, name) for name in row)])]


_WHOLE = _with_other_names(JOINED_WHOLE)
_ROWS: dict[str, list[tuple[str, ...]]] = {}  # by member, in the order of the tables
for _row in (*_WHOLE, *_with_other_names(JOINED)):
    for _member in _row:
        _ROWS.setdefault(_member, []).append(_row)


def joined_with(name: str, names: Container[str]) -> tuple[str, ...]:
    """Return the weights among ``names`` that a server joins to one with this weight, including itself."""
    if not name.endswith("weight") or (found := _row_of(name, names)) is None:
        return (name,)
    prefix, row = found
    group = (f"{prefix}{member}.weight" for member in row)
    return tuple(each for each in group if each in names and _row_of(each, names) == found)


def groups_of(chosen: Iterable[str], linears: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return, by name, the weights among ``chosen`` that share a per-tensor scale in a model with ``linears``.

    The layer that an adapter wraps (``q_proj.base_layer``) is joined under the adapter's name.
    """
    names = {_without_adapter(name): name for name in linears}
    ordered = [_without_adapter(name) for name in chosen]
    own = set(ordered)
    groups: dict[str, tuple[str, ...]] = {}
    for name in ordered:  # the order of the model, which all ranks have
        if names[name] in groups:  # found with another weight of the group
            continue
        group = joined_with(name, names)
        if not own.issuperset(group):
            group = joined_with(name, own.intersection(group))
        groups |= dict.fromkeys((found := tuple(names[each] for each in group)), found)
    return groups


def _without_adapter(name: str) -> str:
    return name.replace(".base_layer.", ".")


def _row_of(name: str, names: Container[str]) -> tuple[str, tuple[str, ...]] | None:
    """Return the prefix and the row of the tables by which a weight is joined."""
    for prefix, member in _split(name):
        for row in _ROWS[member]:
            present = [f"{prefix}{each}.weight" in names for each in row].count(True)
            if present == len(row) or (present > 1 and row not in _WHOLE):
                return prefix, row
    return None


def _split(name: str) -> Iterator[tuple[str, str]]:
    """Yield (prefix, member) for the members of the tables that the name of a weight ends with."""
    module = name.removesuffix(".weight")
    start = len(module)
    for _ in range(2):  # members have one or two parts
        start = module.rfind(".", 0, start)
        if (member := module[start + 1 :]) in _ROWS:
            yield module[: start + 1], member
        if start < 0:
            return


def is_stored_transposed(model_type: object, name: str) -> bool:
    """Return whether dense files of such a model have this weight as (K, N)."""
    return model_type in TRANSPOSED_LINEARS and is_matched(name, CONV1D)


def natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def some(names: Sequence[str]) -> str:
    """Return the first few names and the number of others, for a message."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
