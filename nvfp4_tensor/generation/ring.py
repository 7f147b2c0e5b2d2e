"""What a step reads and writes of one layer of a cache: dense buffers, or codes and a ring of the latest tokens.

Token p behind the front is in slot p % (recent + 1) of the ring. A step at position p writes its token, attends to the
codes of all tokens that are not in the ring and to the ring, and quantizes the oldest token of the ring, which the next
step overwrites. What a step writes depends on its position alone, so that it may run again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nvfp4_tensor.generation.architectures import Block


def to_ring(latest: Tensor, position: int, spare: Tensor | None = None) -> Tensor:
    """Return a ring (batch, heads, recent + 1, head_dim) with the latest tokens (batch, heads, recent, head_dim).

    Args:
        position: the position of the next token behind the front.
        spare: a ring whose memory is used if it fits.
    """
    batch, heads, recent, dim = latest.shape
    shape = batch, heads, recent + 1, dim
    if spare is None or spare.shape != shape or (spare.dtype, spare.device) != (latest.dtype, latest.device):
        with torch.inference_mode(False):  # inference tensors could not be written to outside of that mode
            spare = torch.zeros(shape, dtype=latest.dtype, device=latest.device)
    return spare.index_copy_(2, _slots(spare, position), latest)


def from_ring(ring: Tensor, position: int) -> Tensor:
    """Return the tokens before ``position`` behind the front (batch, heads, recent, head_dim)."""
    return ring.index_select(2, _slots(ring, position))


def _slots(ring: Tensor, position: int) -> Tensor:
    """Return the slots of the tokens before ``position``, in order."""
    size = ring.shape[2]
    return torch.arange(position - size + 1, position, device=ring.device) % size


class Place(NamedTuple):
    """Where a step writes its token, and what its texts see: int64 on their device."""

    position: Tensor
    """(1,): the number of tokens in the cache; of a cache of codes, of those behind its front."""
    starts: Tensor | None
    """(batch,): the first position that each text sees, after left padding; None: 0."""
    lengths: Tensor | None = None
    """(batch,), of a cache of codes: the tokens in codes, to which the oldest token of the ring is appended."""


class DenseBuffers(NamedTuple):
    """Keys and values (batch, kv_heads, capacity, head_dim)."""

    keys: Tensor
    values: Tensor

    @property
    def dense(self) -> tuple[Tensor, Tensor]:
        """The keys and values to which a step writes its token."""
        return self.keys, self.values

    @property
    def identity(self) -> tuple[int, ...]:
        """What a graph depends on."""
        return self.keys.data_ptr(), self.values.data_ptr()

    def place_of(self, position: Tensor, starts: Tensor | None) -> Place:
        """Return the place of the token at ``position``, int64 (1,), which is the same for all layers."""
        return Place(position, starts)

    def attend(self, block: Block, before: tuple[Any, ...], place: Place) -> Tensor:
        """Append a token, and return its attention (batch, heads * head_dim).

        Args:
            before: what ``nvfp4::attend_one`` takes of the token: qkv, norms, cos and sin.
        """
        kinds, numbers = block.kinds, block.numbers
        attended: Tensor = torch.ops.nvfp4.attend_one(
            *before, self.keys, self.values, place.position, kinds["heads"], numbers["scaling"], kinds["window"],
            numbers["softcap"], block.parts.get("sinks"), place.starts,
        )  # fmt: skip
        return attended


class CodedBuffers(NamedTuple):
    """Parts of an NVFP4 cache.

    Attributes:
        coded: codes, block scales and factors of keys, then of values.
        front: keys and values of the first tokens; none without a sink.
        dense: the ring of the latest tokens, keys and values.
        coding: the spec, packed, and whether codes are those of rotated keys.
    """

    coded: tuple[Tensor, ...]
    front: tuple[Tensor, ...]
    dense: tuple[Tensor, Tensor]
    coding: tuple[int, bool]
    sink: int
    recent: int

    @property
    def by_text(self) -> tuple[Tensor, ...]:
        """What there is of each text (batch, ...)."""
        return *self.coded, *self.front, *self.dense

    @property
    def identity(self) -> tuple[int, ...]:
        """What a graph depends on."""
        return *self.coding, self.sink, self.recent, *(t.data_ptr() for t in self.by_text)

    def first(self, rows: int) -> CodedBuffers:
        """Return those of the first texts."""
        coded, front, dense = (tuple(t[:rows] for t in each) for each in (self.coded, self.front, self.dense))
        return self._replace(coded=coded, front=front, dense=(dense[0], dense[1]))

    def place_of(self, position: Tensor, starts: Tensor | None) -> Place:
        """As :meth:`DenseBuffers.place_of`."""
        behind = position - self.sink
        return Place(behind, starts, (behind - self.recent).expand(self.dense[0].shape[0]).contiguous())

    def attend(self, block: Block, before: tuple[Any, ...], place: Place) -> Tensor:
        """As :meth:`DenseBuffers.attend`; puts the ring's oldest token into codes."""
        spec, is_rotated = self.coding
        q: Tensor = torch.ops.nvfp4.place_one(
            *before, *self.dense, place.position, block.kinds["heads"], spec, *self.coded, place.lengths, is_rotated
        )
        attended: Tensor = torch.ops.nvfp4.attend_codes(
            q, *self.coded, place.lengths, place.starts, *(self.front or (None, None)), *self.dense,
            block.numbers["scaling"], block.numbers["softcap"], 0, is_rotated,
            settled=True,  # place_one writes codes behind `place.lengths`
        )  # fmt: skip
        return attended.flatten(1)


StepBuffers = DenseBuffers | CodedBuffers
