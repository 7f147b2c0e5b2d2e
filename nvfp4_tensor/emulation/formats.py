"""Block formats: the element format, the scale format, the block size, and whether the tensor has a scale too."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from nvfp4_tensor.emulation.elements import ELEMENTS, Element
from nvfp4_tensor.emulation.scales import SCALES, Scale

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockFormat:
    """A block format. ``element`` and ``scale`` may be given by name.

    Args:
        name: the name in messages.
        element: the element format.
        scale: the format of block scales.
        block_size: the number of elements of the last dimension that share a scale.
        two_level: whether the tensor also has a float32 scale, as in NVFP4.

    Raises:
        ValueError: an unknown name, or a block whose elements do not fill an integer number of bytes.

    Example:
        >>> mine = BlockFormat(name="mine", element="e3m2", scale="e5m2", block_size=8, two_level=True)
        >>> mine.bits_per_element
        7.0
    """

    name: str
    element: Element
    scale: Scale
    block_size: int
    two_level: bool = False

    def __post_init__(self) -> None:
        for what, table in (("element", ELEMENTS), ("scale", SCALES)):  # the dataclass is frozen
            object.__setattr__(self, what, _entry(what, getattr(self, what), table))
        if not isinstance(self.block_size, int) or self.block_size < 1 or self.block_size * self.element.bits % 8:
            raise ValueError(
                f"invalid block_size {self.block_size!r}: a block of {self.element.bits}-bit elements must fill an "
                "integer number of bytes"
            )

    @property
    def bits_per_element(self) -> float:
        """The bits of an element plus its share of the block scale."""
        return self.element.bits + self.scale.bits / self.block_size

    @property
    def largest_value(self) -> float:
        """The product of the largest element and the largest block scale that a tensor scale allows."""
        return self.element.largest * self.scale.ceiling

    def replace(self, **changes: Any) -> BlockFormat:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    @staticmethod
    def of(format: BlockFormat | str) -> BlockFormat:
        """Return ``format``, or the entry of :data:`FORMATS` with that name; raise a ValueError for other values."""
        return _entry("format", format, FORMATS)


def _entry(what: str, value: T | str, table: Mapping[str, T]) -> T:
    """Return ``value``, or the entry of the table with that name; raise a ValueError for other values."""
    kind = type(next(iter(table.values())))
    if isinstance(value, kind):
        return value
    if isinstance(value, str) and value in table:
        return table[value]
    raise ValueError(f"unknown {what} {value!r}: use a {kind.__name__} or one of {', '.join(map(repr, table))}")


FORMATS = {
    name: BlockFormat(
        name=name, element=ELEMENTS[element], scale=SCALES[scale], block_size=size, two_level=name == "nvfp4"
    )
    for name, element, scale, size in (
        ("nvfp4", "e2m1", "e4m3", 16),
        ("mxfp4", "e2m1", "e8m0", 32),
        ("mxfp6_e2m3", "e2m3", "e8m0", 32),
        ("mxfp6_e3m2", "e3m2", "e8m0", 32),
        ("mxfp8_e4m3", "e4m3", "e8m0", 32),
        ("mxfp8_e5m2", "e5m2", "e8m0", 32),
        ("mxint8", "int8", "e8m0", 32),
        ("int4", "int4", "float16", 32),
        ("int8", "int8", "float16", 32),
    )
}
"""The formats by name. int4 and int8 are symmetric, in groups of 32, with the range of their float16 scale."""
