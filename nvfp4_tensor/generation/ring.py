"""The latest tokens of a cache's layer in a ring, which a CUDA graph writes to: buffers that stay where they are.

Token p behind the front is in slot p % (recent + 1). A step at position p writes its token, attends to the codes of all
tokens that are not in the ring and to the ring, and quantizes the oldest token of the ring, which the next step
overwrites. What a step writes depends on its position alone, so that it may run again.
"""

from __future__ import annotations

from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nvfp4_tensor.generation.coded_states import CodedStates


class Ring:
    """Keys and values (batch, heads, recent + 1, head_dim).

    Args:
        keys, values: the latest tokens, (batch, heads, recent, head_dim).
        position: the position of the next token behind the front.
        spare: a ring whose memory is used if it fits.
    """

    def __init__(self, keys: Tensor, values: Tensor, position: int, spare: Ring | None = None) -> None:
        self.size = keys.shape[2] + 1
        slots = self._slots(position, keys.device)
        self.keys: Tensor = self._filled(keys, slots, None if spare is None else spare.keys)
        self.values: Tensor = self._filled(values, slots, None if spare is None else spare.values)

    def _filled(self, latest: Tensor, slots: Tensor, buffer: Tensor | None) -> Tensor:
        shape = (*latest.shape[:2], self.size, latest.shape[3])
        if buffer is None or buffer.shape != shape or (buffer.dtype, buffer.device) != (latest.dtype, latest.device):
            with torch.inference_mode(False):  # inference tensors could not be written to outside of that mode
                buffer = torch.zeros(shape, dtype=latest.dtype, device=latest.device)
        return buffer.index_copy_(2, slots, latest)

    def _slots(self, position: int, device: torch.device) -> Tensor:
        """Return the slots of the tokens before ``position``, in order."""
        return torch.arange(position - self.size + 1, position, device=device) % self.size

    def latest(self, position: int) -> tuple[Tensor, Tensor]:
        """Return the tokens before ``position`` behind the front: keys and values (batch, heads, recent, head_dim)."""
        slots = self._slots(position, self.keys.device)
        return self.keys.index_select(2, slots), self.values.index_select(2, slots)


class Place(NamedTuple):
    """Where a step writes its token, and what its texts see: int64 on their device."""

    position: Tensor
    """(1,): the number of tokens in the cache; of a cache of codes, of those behind its front."""
    starts: Tensor | None
    """(batch,): the first position that each text sees, after left padding; None: 0."""
    lengths: Tensor | None = None
    """(batch,), of a cache of codes: the tokens in codes, to which the oldest token of the ring is appended."""


class GraphBuffers(NamedTuple):
    """What a step reads and writes of one layer."""

    keys: CodedStates
    values: CodedStates
    ring: Ring
    spec: int
    sink: int
    recent: int

    @property
    def coded(self) -> tuple[Tensor, ...]:
        return *self.keys.coded, *self.values.coded

    @property
    def is_rotated(self) -> bool:
        return self.keys.rotation is not None

    @property
    def addresses(self) -> tuple[int, ...]:
        dense = (self.ring.keys, self.ring.values, self.keys.front, self.values.front)
        return tuple(t.data_ptr() for t in (*self.keys.coded, *self.values.coded, *dense))

    def first(self, rows: int) -> GraphBuffers:
        """Return those of the first texts."""
        keys, values, ring = copy(self.keys), copy(self.values), copy(self.ring)
        for states in (keys, values):
            for name in ("codes", "scale", "factor", "front"):
                setattr(states, name, getattr(states, name)[:rows])
        ring.keys, ring.values = ring.keys[:rows], ring.values[:rows]
        return self._replace(keys=keys, values=values, ring=ring)

    def place_of(self, position: Tensor, starts: Tensor | None) -> Place:
        """Return the place of the token at ``position``, int64 (1,), which is the same for all layers."""
        behind = position - self.sink
        return Place(behind, starts, (behind - self.recent).expand(self.ring.keys.shape[0]).contiguous())

    def place(self, before: tuple[Any, ...], place: Place, heads: int) -> Tensor:
        """Put a token into the ring, and the ring's oldest token into codes; return the token's queries.

        Args:
            before: what ``nvfp4::place_one`` takes of the token: qkv, norms, cos and sin.
        """
        q: Tensor = torch.ops.nvfp4.place_one(
            *before, self.ring.keys, self.ring.values, place.position, heads, self.spec, *self.coded, place.lengths,
            self.is_rotated,
        )  # fmt: skip
        return q

    def attend(self, q: Tensor, place: Place, scale: float, softcap: float) -> Tensor:
        """Return the attention (batch, heads * head_dim) of the token placed last to codes and to the ring."""
        front = (self.keys.front, self.values.front) if self.sink else (None, None)
        attended: Tensor = torch.ops.nvfp4.attend_codes(
            q, *self.coded, place.lengths, place.starts, *front, self.ring.keys, self.ring.values, scale, softcap, 0,
            self.is_rotated, settled=True,  # place() writes codes behind `place.lengths`
        )  # fmt: skip
        return attended.flatten(1)


Buffer = Tensor | GraphBuffers
"""Keys or values of a layer, (B, kv_heads, length, head_dim), or both, with codes."""
