"""The choice of the next token from logits, on the device, so that a CUDA graph can contain it.

Random numbers are a function of seed, row and index of the token alone (a hash of a counter), so that a text can be
written again with the same seed, on any device, in any number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROWS = 1 << 16
"""The largest number of calls for which random numbers are computed at once."""
BITS = 48
"""Bits of a random number: enough for rare tokens, and u * total rounds to less than the total in float64."""
PARTS = 32
"""Parts of a row whose largest logits are found one by one: torch's kernel gives a row to one block, which takes 27 us
for 128,256 logits on an H200."""

_FLOAT32 = torch.finfo(torch.float32)


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        temperature: 0 for the largest logit; otherwise logits are divided by it, and a token is drawn.
        top_k: draw from the k largest logits.
        top_p: draw from the smallest set of the largest probabilities whose sum is at least this number.
        seed: of the random numbers; or one for each text, which then has those of the only text of that seed.

    Raises:
        TypeError, ValueError: for values that are not valid, or ``top_k`` or ``top_p`` with temperature 0.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | Sequence[int] = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0 or self.temperature == float("inf"):
            raise ValueError(f"temperature must be 0 (the largest logit) or a positive number, got {self.temperature}")
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            raise ValueError(f"top_k must be a positive integer or None, got {self.top_k!r}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1] or None, got {self.top_p}")
        if not all(isinstance(each, int) for each in (self.seed if isinstance(self.seed, Sequence) else (self.seed,))):
            raise TypeError(f"seed must be an int, or one for each text, got {self.seed!r}")
        if not self.temperature and (self.top_k is not None or self.top_p is not None):
            raise ValueError("top_k and top_p choose among random tokens: set temperature, for instance to 1.0")

    @property
    def kind(self) -> tuple[bool, int | None, bool]:
        """What a graph of the choice depends on. Temperature, top_p and random numbers are values that it reads."""
        return self.temperature > 0, self.top_k, self.top_p is not None


class Chooser:
    """Chooses one token per row, call by call. Buffers keep their addresses when other values are loaded.

    Args:
        batch: number of rows, at most.
        count: number of calls.
        rows: tokens are drawn for so many rows at a time, of which ``batch`` is a multiple; None: for all.

    Attributes:
        count: number of calls with the random numbers that are loaded, at most ROWS.
        end: the first call without random numbers, before which :meth:`load_more`.
        chosen: int64 (B,), the last tokens; -1 for a row whose logits have a NaN.
        index: int64 (1,), the number of calls since sampling was loaded.
        in_use: a text is being written with it.
    """

    in_use = False

    def __init__(
        self, sampling: Sampling, batch: int, count: int, device: torch.device, rows: int | None = None
    ) -> None:
        self.kind, self.batch, self.rows = sampling.kind, batch, rows
        self.count = min(1 << (count - 1).bit_length(), ROWS)
        self._temperature = torch.ones((), dtype=torch.float32, device=device)
        self._top_p = torch.ones((), dtype=torch.float64, device=device)
        self._uniforms = torch.zeros((self.count, batch), dtype=torch.float64, device=device)
        self.index = torch.zeros((1,), dtype=torch.int64, device=device)
        self.chosen = torch.zeros((batch,), dtype=torch.int64, device=device)
        self.load(sampling)

    def load(self, sampling: Sampling, texts: Sequence[int] | None = None, first: int = 0) -> None:
        """Choose with this sampling, of the same kind, for rows that are these texts, from call ``first`` on."""
        assert sampling.kind == self.kind
        self._texts = range(self.batch) if texts is None else texts
        if self.kind[0]:
            self._temperature.fill_(min(max(sampling.temperature, _FLOAT32.tiny), _FLOAT32.max))
            self._top_p.fill_(1.0 if sampling.top_p is None else sampling.top_p)
        self._seed = sampling.seed
        self.load_more(first)

    def load_more(self, first: int) -> None:
        """Load the random numbers of the ``count`` calls from ``first`` on."""
        self.end = first + self.count
        if self.kind[0]:
            if isinstance(self._seed, int):
                new = uniforms(self._seed, self.count, self._texts, first)
            else:
                seeds = [
                    self._seed[text] for text in self._texts if text < len(self._seed)
                ]  # no text: a row behind all
                new = torch.cat([uniforms(seed, self.count, (0,), first) for seed in seeds], -1)
            self._uniforms[:, : new.shape[1]].copy_(new)
        self.index.zero_()

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the next tokens, int64 (B,), valid also where ``chosen`` is -1. logits: (B, vocabulary)."""
        count = len(logits)
        if self.rows:
            logits = torch.nn.functional.pad(logits, (0, 0, 0, -count % self.rows))
        largest, tokens = largest_of(logits)
        if self.kind[0]:
            numbers = self._uniforms.index_select(0, self.index)[0, : len(logits)]
            parts = zip(*(each.split(self.rows or len(logits)) for each in (logits, largest, numbers)), strict=True)
            tokens = torch.cat([self._draw(*part) for part in parts])
            self.index += 1
        if self.rows:
            largest, tokens = largest[:count], tokens[:count]
        chosen = self.chosen if count == self.batch else self.chosen[:count]
        chosen.copy_(torch.where(largest.isnan(), -1, tokens))
        return tokens

    def _draw(self, logits: Tensor, largest: Tensor, numbers: Tensor) -> Tensor:
        _, top_k, has_top_p = self.kind
        # The largest score is 0, so that no temperature makes scores overflow; inf - inf is one of the largest.
        scores = torch.sub(logits, largest.float()[:, None]).div_(self._temperature)
        scores, tokens = scores.nan_to_num_(0.0, neginf=-torch.inf), None
        if top_k is not None and top_k < scores.shape[-1]:
            scores, tokens = torch.topk(scores, top_k)
        elif has_top_p:
            scores, tokens = torch.sort(scores, descending=True)
        mass = torch.softmax(scores, -1).double()
        ends = mass.cumsum(-1)
        if has_top_p:
            # A token is kept if those before it do not reach top_p.
            mass = torch.where(ends - mass < self._top_p, mass, 0.0)
            ends = mass.cumsum(-1)
        target = numbers[:, None] * ends[:, -1:]
        index = (ends <= target).sum(-1, keepdim=True).clamp(max=scores.shape[-1] - 1)
        return (index if tokens is None else tokens.gather(-1, index))[:, 0]


def largest_of(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logit of each row (B,), NaN if there is one, and its first index, int64 (B,)."""
    if logits.shape[-1] % PARTS:
        return logits.max(-1)
    best, index = logits.unflatten(-1, (PARTS, -1)).max(-1)
    largest, part = best.max(-1, keepdim=True)
    return largest[:, 0], (index.gather(-1, part) + part * (logits.shape[-1] // PARTS))[:, 0]


def uniforms(seed: int, count: int, texts: Sequence[int], first: int = 0) -> Tensor:
    """Return random numbers in [0, 1), float64 (count, texts) on the CPU: those of calls ``first`` and following."""
    with torch.device("cpu"):  # whatever the default device is
        index = torch.arange(first, first + count)[:, None] * (1 << 20) + torch.tensor(texts, dtype=torch.int64)
        bits = _mixed(_mixed(torch.tensor(_signed(seed), dtype=torch.int64)) + index)
    return (bits >> 64 - BITS & (1 << BITS) - 1).double() / (1 << BITS)


def _mixed(x: Tensor) -> Tensor:
    """Return the splitmix64 hash of each int64."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, count: int) -> Tensor:
    """Return x >> count as for unsigned integers."""
    return x >> count & (1 << 64 - count) - 1


def _signed(x: int) -> int:
    """Return the int64 with the low 64 bits of x."""
    x &= (1 << 64) - 1
    return x - (1 << 64) if x >> 63 else x
