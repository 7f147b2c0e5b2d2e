"""A block format: which element, which scale, how many elements share one, and whether the tensor has a scale too."""

from __future__ import annotations

import dataclasses
from typing import Any

from nvfp4_tensor.emulation.elements import ELEMENTS, Element
from nvfp4_tensor.emulation.scales import SCALES, Scale


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockFormat:
    """One block format; ``element`` and ``scale`` may be given by name.

    Args:
        block_size: elements of the last dimension that share a scale.
        two_level: whether the tensor has a float32 scale of its own, as NVFP4 has.

    Raises:
        ValueError: an unknown name, or a block that does not fill whole bytes.

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
        object.__setattr__(self, "element", Element.of(self.element))  # the dataclass is frozen
        object.__setattr__(self, "scale", Scale.of(self.scale))
        if not isinstance(self.block_size, int) or self.block_size < 1 or self.block_size * self.element.bits % 8:
            raise ValueError(
                f"block_size {self.block_size!r} does not do: a block of {self.element.bits}-bit elements fills whole "
                "bytes"
            )

    @property
    def bits_per_element(self) -> float:
        """Bits of an element and its share of the block's scale."""
        return self.element.bits + self.scale.bits / self.block_size

    @property
    def largest_value(self) -> float:
        """What the largest element times the largest scale that a tensor scale allows for comes to."""
        return self.element.largest * self.scale.ceiling

    def replace(self, **changes: Any) -> BlockFormat:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    @staticmethod
    def of(format: BlockFormat | str) -> BlockFormat:
        """The format itself, or the one of :data:`FORMATS` that a word names; ValueError for any other."""
        if isinstance(format, BlockFormat):
            return format
        if isinstance(format, str) and format in FORMATS:
            return FORMATS[format]
        raise ValueError(f"unknown format {format!r}: use a BlockFormat or one of {', '.join(map(repr, FORMATS))}")


def _format(name: str, element: str, scale: str, block_size: int, two_level: bool = False) -> BlockFormat:
    return BlockFormat(
        name=name, element=ELEMENTS[element], scale=SCALES[scale], block_size=block_size, two_level=two_level
    )


FORMATS = {
    format.name: format
    for format in (
        _format("nvfp4", "e2m1", "e4m3", 16, two_level=True),
        _format("mxfp4", "e2m1", "e8m0", 32),
        _format("mxfp6_e2m3", "e2m3", "e8m0", 32),
        _format("mxfp6_e3m2", "e3m2", "e8m0", 32),
        _format("mxfp8_e4m3", "e4m3", "e8m0", 32),
        _format("mxfp8_e5m2", "e5m2", "e8m0", 32),
        _format("mxint8", "int8", "e8m0", 32),
        _format("int4", "int4", "float16", 32),
        _format("int8", "int8", "float16", 32),
    )
}
"""The formats by name. int4 and int8 are symmetric, in groups of 32 with a float16 scale, whose range they have."""
