"""Keys and values of one layer: dense tokens at the front, codes, the latest tokens dense; and what attention reads.

Codes, block scales and factors are bytes (batch, heads, capacity, bytes per row), written in place; the capacity grows
by :data:`GROWTH` tokens. A token is quantized once. The layout is that of ``nvfp4::attend_codes``: each head of each
sequence is contiguous, block scales are not padded to tiles, and a batch entry is a slice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from nvfp4_tensor.numerics.hadamard import rotate_heads_back, rotation_size
from nvfp4_tensor.numerics.layout import BLOCK, ceil_to
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.ops.composite.attention import decode_heads

GROWTH = 128
"""Tokens by which codes grow. A growth copies them: 1/64 of what the attention of 128 tokens reads."""

MOST_HEAD_DIM = 512
"""The largest head that ``nvfp4::attend_codes`` supports."""

Coded = tuple[Tensor, Tensor, Tensor]


class CodedStates:
    """The keys or the values of one layer. A row is one token of one head.

    Attributes:
        front: the first tokens, unquantized: (batch, heads, up to ``sink`` tokens, head_dim).
        codes: uint8 (batch, heads, capacity, padded head_dim / 2), head_dim padded to a multiple of 16.
        scale: bytes of e4m3 (batch, heads, capacity, padded head_dim / 16).
        factor: bytes of e8m0 (batch, heads, capacity): value = code x block scale x factor.
        latest: the latest tokens, unquantized: (batch, heads, up to ``recent`` tokens, head_dim).
    """

    front: Tensor
    codes: Tensor
    scale: Tensor
    factor: Tensor
    latest: Tensor
    rotation: Tensor | None = None
    """The Hadamard matrix (n, n) by which codes are rotated, over each n elements of a head; None: they are not."""
    stored: int
    """Tokens in codes."""
    changes: int
    """How often stored tokens were removed or reordered: what was returned before may have been overwritten."""

    def __init__(self, x: Tensor, rotates: bool = False) -> None:
        # Not a slice of x, which would keep the whole prompt in memory.
        self.front = self.latest = x.new_empty((*x.shape[:2], 0, x.shape[3]))
        padded = ceil_to(x.shape[-1], BLOCK)
        self.codes, self.scale, self.factor = (
            torch.empty((*x.shape[:2], 0, *size), dtype=torch.uint8, device=x.device)
            for size in ((padded // 2,), (padded // BLOCK,), ())
        )
        self.stored = self.changes = 0
        if rotates:
            with torch.inference_mode(False):  # as in reserve()
                self.rotation = rotate_heads_back(
                    torch.eye(rotation_size(x.shape[-1]), dtype=torch.float32, device=x.device)
                )

    @property
    def coded(self) -> Coded:
        """Codes, block scales and factors, with their free capacity."""
        return self.codes, self.scale, self.factor

    @property
    def head_dim(self) -> int:
        return self.latest.shape[-1]

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return self.front.shape[2] + self.stored + self.latest.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of codes with their free capacity, and of dense tokens."""
        return sum(t.numel() * t.element_size() for t in (self.front, *self.coded, self.latest))

    def reserve(self, tokens: int, spare: CodedStates | None = None) -> None:
        """Grow the codes' capacity to at least so many tokens; if there are none yet, in the memory of ``spare``."""
        if tokens <= self.codes.shape[2]:
            return
        if (
            spare is not None
            and not self.stored
            and spare.codes.shape[2] >= tokens
            and all(map(_fits, self.coded, spare.coded))
        ):
            self.codes, self.scale, self.factor = spare.coded
            return
        capacity = ceil_to(tokens, GROWTH)
        with torch.inference_mode(False):  # inference tensors could not be written to outside of that mode
            self.codes, self.scale, self.factor = (_grown(t, self.stored, capacity) for t in self.coded)

    def to_front(self, x: Tensor, sink: int) -> tuple[Tensor, Tensor]:
        """Take the first tokens of x (batch, heads, tokens, head_dim) to the front if it has room.

        Returns:
            The front, through whose new tokens gradients flow, and the other tokens of x.
        """
        taken = min(sink - self.front.shape[2], x.shape[2])
        if taken <= 0 or self.stored or self.latest.shape[2]:
            return self.front, x
        front = torch.cat((self.front, x[:, :, :taken]), dim=2)
        self.front = front.detach()
        return front, x[:, :, taken:]

    def keep_latest(self, fresh: Tensor, older: int) -> None:
        """Take all but the first ``older`` tokens of ``fresh`` as the latest."""
        latest = fresh[:, :, older:].detach()
        # A view would keep the full prompt in memory; of a few tokens more, a copy would cost more than they do.
        self.latest = latest.clone() if older > latest.shape[2] else latest

    def decode(self, dtype: torch.dtype, stored: int) -> Tensor:
        """Decode the first ``stored`` tokens of the codes: (batch, heads, stored, head_dim)."""
        return _decoded(self.coded, stored, self.head_dim, dtype, self.rotation)

    def select(self, tokens: int, entries: Tensor | None) -> None:
        """Keep the first ``tokens`` tokens and the given batch entries (None: all), int64 (m,) on the CPU, in order."""
        front, stored = self.front.shape[2], self.stored
        self.front = self.front[:, :, : min(tokens, front)]
        self.stored = min(max(tokens - front, 0), stored)
        self.latest = self.latest[:, :, : max(tokens - front - stored, 0)]
        self.changes += 1
        if entries is None:
            return
        index = entries.to(self.codes.device)
        with torch.inference_mode(False):  # as in reserve()
            self.front, self.codes, self.scale, self.factor, self.latest = (
                t.index_select(0, index) for t in (self.front, *self.coded, self.latest)
            )

    def to(self, device: torch.device | str) -> None:
        """Move all tokens."""
        self.front, self.codes, self.scale, self.factor, self.latest = (
            t.to(device, non_blocking=True) for t in (self.front, *self.coded, self.latest)
        )
        self.rotation = None if self.rotation is None else self.rotation.to(device)


def _decoded(coded: Coded, stored: int, size: int, dtype: torch.dtype, rotation: Tensor | None) -> Tensor:
    codes, scale, factor = (t[:, :, :stored] for t in coded)
    x = decode_heads(codes, scale, factor, size, dtype)  # 6 bits of mantissa: exact in bfloat16
    return x if rotation is None else (x.unflatten(-1, (-1, len(rotation))) @ rotation.to(dtype)).flatten(-2)


def _fits(new: Tensor, old: Tensor) -> bool:
    """Return whether two tensors differ in nothing but the number of tokens."""
    return new.shape[:2] == old.shape[:2] and new.shape[3:] == old.shape[3:] and new.device == old.device


def _grown(t: Tensor, used: int, capacity: int) -> Tensor:
    grown = t.new_zeros((*t.shape[:2], capacity, *t.shape[3:]))
    grown[:, :, :used] = t[:, :, :used]
    return grown


def append(keys: CodedStates, values: CodedStates, new_keys: Tensor, new_values: Tensor, spec: QuantizeSpec) -> None:
    """Quantize new keys and values (batch, heads, tokens, head_dim), and append them to the codes."""
    tokens = new_keys.shape[2]
    if not tokens:
        return
    for states in (keys, values):
        states.reserve(states.stored + tokens)
    if new_keys.dtype != new_values.dtype:  # under autocast, which rotates keys in float32
        dtype = torch.promote_types(new_keys.dtype, new_values.dtype)
        new_keys, new_values = new_keys.to(dtype), new_values.to(dtype)
    starts = torch.full((new_keys.shape[0],), keys.stored, dtype=torch.int64, device=new_keys.device)
    torch.ops.nvfp4.append_codes(
        new_keys.detach(), new_values.detach(), spec.pack(), *keys.coded, *values.coded, starts,
        keys.rotation is not None,
    )  # fmt: skip
    keys.stored += tokens
    values.stored += tokens


class StoredStates(Tensor):
    """All keys or values of a layer (batch, heads, length, head_dim), which attention reads where they are stored.

    Any operator of torch decodes them first and gets an ordinary tensor, so other code computes the same.
    ``scaled_dot_product_attention`` of two of them reads codes where :func:`attend` supports it. They are
    valid until the cache removes or reorders tokens; later reads raise a RuntimeError.
    """

    states: CodedStates
    front: Tensor
    coded: Coded
    stored: int
    fresh: Tensor
    changes: int

    @staticmethod
    def __new__(cls, states: CodedStates, stored: int, fresh: Tensor) -> StoredStates:
        """Of ``states`` as they are now: the front, the first ``stored`` tokens of the codes, and ``fresh``."""
        batch, heads, tokens, size = fresh.shape
        shape = (batch, heads, states.front.shape[2] + stored + tokens, size)
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=fresh.dtype, device=fresh.device)
        self.states, self.front, self.coded = states, states.front, states.coded
        self.stored, self.fresh, self.changes = stored, fresh, states.changes
        return self

    def __init__(self, *args: Any) -> None:
        pass

    def check(self) -> None:
        """Raise a RuntimeError if the cache was changed since."""
        if self.changes != self.states.changes:
            raise RuntimeError(
                "these keys or values belong to a cache that has removed or reordered tokens since: use the tensors "
                "that update() returned before changing the cache, or keep key_states.clone()"
            )

    def dense(self) -> Tensor:
        """Return all tokens as an ordinary tensor, decoded to this dtype."""
        self.check()
        stored = _decoded(self.coded, self.stored, self.shape[-1], self.dtype, self.states.rotation)
        return torch.cat((self.front.to(self.dtype), stored, self.fresh), dim=2)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, {self.stored} tokens in codes)"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dense().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.dense()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__setitem__ and isinstance(args[0], StoredStates):  # into what a slice decodes to
            raise RuntimeError("cannot write into stored keys or values: clone() them first")
        if func is torch.nn.functional.scaled_dot_product_attention:
            out = _attend_to_all(*args, **kwargs)
            if out is not None:
                return out
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._schema.is_mutable:
            raise RuntimeError(f"{func} cannot write into stored keys or values: clone() them first")
        args, kwargs = tree_map_only(StoredStates, lambda t: t.dense(), (args, kwargs or {}))
        return func(*args, **kwargs)


def attend(
    q: Tensor,
    keys: StoredStates,
    values: StoredStates,
    scale: float | None = None,
    *,
    softcap: float = 0.0,
    window: int = 0,
    first: Tensor | None = None,
) -> Tensor:
    """Return the attention of the latest tokens' q (batch, heads, tokens, head_dim) to stored keys and values.

    Each token sees its own position and those before it, from ``first`` (batch,) on, ``window`` of them (0: all).
    """
    keys.check()
    values.check()
    lengths = torch.full((q.shape[0],), keys.stored, dtype=torch.int64, device=q.device)
    front = (keys.front, values.front) if keys.front.shape[2] else (None, None)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return torch.ops.nvfp4.attend_codes(
        q, *keys.coded, *values.coded, lengths, first, *front, keys.fresh, values.fresh, scale, softcap, window,
        keys.states.rotation is not None,
    )  # fmt: skip


def why_not(q: Tensor, keys: Any, values: Any) -> str:
    """Return why :func:`attend` does not support these operands; empty if it does."""
    if not (isinstance(keys, StoredStates) and isinstance(values, StoredStates)):
        return "keys and values are dense"
    if isinstance(q, StoredStates) or q.dim() != 4 or q.shape[0] != keys.shape[0] or q.shape[1] % keys.shape[1]:
        return f"queries {tuple(q.shape)} do not fit keys {tuple(keys.shape)}"
    if {q.dtype, values.dtype, keys.front.dtype, values.front.dtype} != {keys.dtype}:
        return f"queries are {q.dtype}, keys {keys.dtype}, values {values.dtype}"
    if torch.is_grad_enabled() and (q.requires_grad or keys.fresh.requires_grad or values.fresh.requires_grad):
        return "gradients are recorded"
    if max(q.shape[-1], values.shape[-1]) > MOST_HEAD_DIM:
        return f"heads have more than {MOST_HEAD_DIM} elements"
    return ""


def _attend_to_all(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """scaled_dot_product_attention where each query sees all tokens, as one new token does; None for anything else."""
    if attn_mask is not None or is_causal or dropout_p or why_not(query, key, value):
        return None
    if query.shape[1] != key.shape[1] and not enable_gqa:
        return None  # an error, which torch raises
    batch, heads, rows, size = query.shape
    out = attend(query.reshape(batch, heads * rows, 1, size), key, value, scale)  # type: ignore[arg-type]
    return out.view(batch, heads, rows, value.shape[-1])
