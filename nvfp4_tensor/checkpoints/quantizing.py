"""Quantizing a folder of dense safetensors, or a GGUF, without a model and without its size in memory."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nvfp4_tensor.checkpoints.architectures import (
    JOINED_AS,
    LEFT_DENSE,
    LM_HEAD,
    NOT_LINEAR,
    TRANSPOSED_EXPERTS,
    TRANSPOSED_LINEARS,
)
from nvfp4_tensor.checkpoints.checkpoint import Checkpoint, Entry, format_named
from nvfp4_tensor.checkpoints.formats.dense import FORMAT as DENSE
from nvfp4_tensor.checkpoints.formats.gguf.format import FORMAT as GGUF
from nvfp4_tensor.checkpoints.io.folder import FolderCheckpoint
from nvfp4_tensor.checkpoints.io.safetensors import CHUNK
from nvfp4_tensor.checkpoints.names import is_matched, joined_with, some
from nvfp4_tensor.checkpoints.parts import LARGEST, LinearParts
from nvfp4_tensor.checkpoints.wrappers import View, WithHead
from nvfp4_tensor.numerics import layout
from nvfp4_tensor.numerics.layout import BLOCK, HIGH_PRECISION_DTYPES, TILE_ROWS
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.tensor.arguments import stored_spec

HELD = 256 << 20
"""Bytes of dense weights that are kept between the search for their largest magnitude and their quantization."""


def quantize(
    src: str | Path,
    dst: str | Path,
    *,
    to: str = "modelopt",
    spec: QuantizeSpec | None = None,
    exclude: Sequence[str] = (),
    include: Sequence[str] = (),
    quantize_lm_head: bool = False,
    input_amax: Mapping[str, float] | None = None,
    seed: int = 0,
    progress: bool = True,
    **options: Any,
) -> None:
    """Quantize a folder of dense safetensors, or a GGUF, into ``dst``. No model is built, and memory stays under 2 GB.

    Every weight of two dimensions and columns in multiples of 16 is quantized, but those that names say to be
    embeddings, output layers, routers of experts or encoders of other media (``names.LEFT_DENSE``). In ModelOpt's
    layout the experts of gpt-oss and Llama 4 are quantized too, each with a per-tensor scale of its own. Linears that
    servers join (q, k, v; gate and up) get one per-tensor scale, that of the largest magnitude of them all. The same
    call takes up an interrupted one at its last whole shard.

    Args:
        src: a folder with *.safetensors, or one such file: bfloat16, float16 or float32. Or a GGUF, whose weights of
            llama.cpp's other types are decoded first.
        dst: is not there yet; it appears when it is whole.
        to: a name of :data:`FORMATS`.
        spec: how; to nearest by default. ``QuantizeSpec(four_over_six=True)`` or ``(scale_search=True)`` lose less.
        exclude: more weights to leave dense: names of modules or parameters, with wildcards ("*.down_proj"), or "re:"
            and a regular expression.
        include: weights to quantize although LEFT_DENSE names them ("lm_head").
        quantize_lm_head: quantize the output layer too. Where it shares the embedding's weight it gets a copy of its
            own, in NVFP4, and the embedding stays dense; config.json says so (``tie_word_embeddings``). vLLM reads no
            such file.
        input_amax: makes it W4A4: by parameter's name ("model.layers.0.mlp.up_proj.weight"), or module's, the largest
            magnitude of what the linear is fed. Linears that it does not name stay weight-only.
        seed: for stochastic rounding; each weight draws from it and from its name.
        progress: show a bar.
        options: of the format that is written.

    Example::

        checkpoints.quantize("SmolLM2-135M", "SmolLM2-135M-NVFP4", spec=QuantizeSpec(four_over_six=True))

    Raises:
        ValueError: nothing to quantize, a pattern that matches nothing, a source that is wrong or quantized already, a
            spec with a Hadamard transform. Then nothing is written.
    """
    target = format_named(to)
    source: Checkpoint = GGUF.read(Path(src)) if GGUF.detect(Path(src)) else FolderCheckpoint(DENSE, Path(src))
    with source:
        if quantize_lm_head:
            source = WithHead(source)
            if is_matched(source.head, exclude):
                raise ValueError(
                    f"quantize_lm_head=True quantizes {source.head}, and exclude=[...] leaves it dense: pass only one "
                    "of them"
                )
            include = (*include, source.head)
        has_scale = functools.partial(target.has_scale, source, options=options)
        checkpoint = Quantized(source, spec, exclude, include, input_amax or {}, seed, has_scale, target.holds_experts)
        target.write(checkpoint, Path(dst), progress=progress, **options)


class Quantized(View):
    """A dense checkpoint as one whose linears are NVFP4: each is quantized when it is asked for."""

    def __init__(
        self,
        source: Checkpoint,
        spec: QuantizeSpec | None = None,
        exclude: Sequence[str] = (),
        include: Sequence[str] = (),
        input_amax: Mapping[str, float] | None = None,
        seed: int = 0,
        has_scale: Callable[[str], bool] = lambda name: True,
        experts: bool = False,
    ) -> None:
        """
        Args:
            has_scale: whether a weight has a per-tensor scale other than 1.
            experts: whether the format that is written holds experts that are one tensor.
            others: as :func:`quantize` takes them.
        """
        super().__init__(source)
        self.spec = stored_spec(spec)
        self.seed = seed
        if self.spec.hadamard_sign is not None:
            raise ValueError("no checkpoint's layout can say that weights are Hadamard-transformed: quantize without")
        if source.config.get("model_type") in TRANSPOSED_LINEARS:
            raise ValueError(
                f"{source.path}: {source.config['model_type']} stores weights as (inputs, outputs), and NVFP4's blocks "
                "run along the inputs: quantize the model itself, layer by layer"
            )
        self.chosen = chosen_linears(source, exclude, include, experts)
        self._of_one = {name for name in self.chosen if not has_scale(name)}
        self._input_amax = _by_parameter(input_amax or {}, self.chosen, source)
        self._amax: dict[tuple[str, ...], Tensor] = {}
        self._held: dict[str, Tensor] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)
        for name in self.chosen:
            static = name in self._input_amax
            self.entries[name] = dataclasses.replace(
                self.chosen[name], quantized=True, quantizes_activations=static, has_input_scale=static
            )

    def identity(self) -> list[Any] | None:
        inner = super().identity()
        settings = [
            str(self.spec),
            self.spec.pack(),
            self.seed,
            sorted(self._of_one),
            sorted(self.chosen),
            sorted(self._input_amax.items()),
        ]
        return None if inner is None else [*inner, *settings]

    def per_tensor_scale(self, name: str) -> Tensor:
        if len(self.entries[name].shape) == 3:
            return self._experts(name).per_tensor_scale
        amax = self._shared_amax(name)
        return torch.where(amax == 0, torch.ones(()), amax / self.spec.largest_value)

    def linear(self, name: str) -> LinearParts:
        entry = self.entries[name]
        if len(entry.shape) == 3:
            return self._experts(name)
        amax = self._shared_amax(name)
        rows, columns = entry.shape
        if name in self._held:
            qdata, scale, per_tensor_scale = self._quantized(name, 0, rows, amax)
        else:
            qdata, scale, per_tensor_scale = self._quantized_in_pieces(name, amax)
        input_amax = torch.tensor(self._input_amax[name]) if entry.has_input_scale else None
        return LinearParts(
            qdata=qdata,
            scale=scale,
            per_tensor_scale=per_tensor_scale,
            columns=columns,
            quantizes_activations=entry.quantizes_activations,
            input_scale=None if input_amax is None else input_amax / LARGEST,
            input_amax=input_amax,
        )

    def _experts(self, name: str) -> LinearParts:
        """Experts that lie (E, K, N) in the file, one after the other: the bits of ``quantize_experts``."""
        count, rows, columns = self.entries[name].shape
        rng_state = self._rng_state(name)
        parts = []
        for expert in range(count):
            x = self.source.rows(name, expert * columns, (expert + 1) * columns).mT.contiguous()
            first, amax = expert * layout.ceil_to(rows, self.spec.block_rows), torch.ops.nvfp4.amax(x)
            parts.append(torch.ops.nvfp4.quantize(x, amax, rng_state, self.spec.pack(), first, 0, columns))
        scales = [layout.unswizzle(scale, rows, columns // BLOCK).view(torch.uint8) for _, scale, _ in parts]
        return LinearParts(
            qdata=torch.stack([qdata for qdata, _, _ in parts]),
            scale=torch.stack(scales).view(torch.float8_e4m3fn),
            per_tensor_scale=torch.stack([factor for _, _, factor in parts]).reshape(count, 1),
            columns=columns,
        )

    def _rng_state(self, name: str) -> Tensor | None:
        return torch.tensor([self.seed, zlib.crc32(name.encode())]) if self.spec.is_stochastic else None

    def _quantized_in_pieces(self, name: str, amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """:meth:`_quantized` of all rows, of which a few are in memory at a time."""
        rows, columns = self.entries[name].shape
        qdata = torch.empty((rows, columns // 2), dtype=torch.uint8)
        scale = torch.empty((rows, columns // BLOCK), dtype=torch.float8_e4m3fn)
        step, factor = _rows_of_a_chunk(self.entries[name]), amax
        for first in range(0, rows, step):
            last = min(first + step, rows)
            qdata[first:last], scale[first:last], factor = self._quantized(name, first, last, amax)
        return qdata, scale, factor

    def _quantized(self, name: str, first: int, last: int, amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, block scales in order and per-tensor scale of some rows: the bits of the whole weight."""
        columns = self.entries[name].shape[1]
        x = self._held[name][first:last] if name in self._held else self._rows(name, first, last)
        rng_state = self._rng_state(name)
        qdata, scale, factor = torch.ops.nvfp4.quantize(x, amax, rng_state, self.spec.pack(), first, 0, columns)
        return qdata, layout.unswizzle(scale, last - first, columns // BLOCK), factor

    def _rows(self, name: str, first: int, last: int) -> Tensor:
        """Some rows of a dense weight, until the next ones are read."""
        self._grow((last - first) * _row_bytes(self.entries[name]))
        return self.source.rows(name, first, last, self._buffer)

    def _grow(self, nbytes: int) -> None:
        """All weights are read into one buffer: fresh memory for each would cost as much as reading."""
        if len(self._buffer) < nbytes:
            self._buffer = torch.empty(nbytes, dtype=torch.uint8)

    def _shared_amax(self, name: str) -> Tensor:
        """The largest magnitude of the weights that a server joins with this one; they are kept if they are small."""
        if name in self._of_one:
            return torch.tensor(self.spec.largest_value)
        group = joined_with(name, self.chosen)
        if group not in self._amax:
            self._hold(group)
            self._amax = {group: torch.stack([self._own_amax(each) for each in group]).amax()}
        return self._amax[group]

    def _hold(self, group: tuple[str, ...]) -> None:
        """Read the weights that are quantized together, if they are small."""
        self._held.clear()
        entries = {name: self.entries[name] for name in group}
        whole = sum(map(_nbytes, entries.values()))
        if whole > HELD:
            return
        self._grow(whole)
        offset = 0
        for name, entry in entries.items():
            self._held[name] = self.source.rows(name, 0, entry.shape[0], self._buffer[offset:])
            offset += _nbytes(entry)

    def _own_amax(self, name: str) -> Tensor:
        if name in self._held:
            return torch.ops.nvfp4.amax(self._held[name])
        rows, step = self.entries[name].shape[0], _rows_of_a_chunk(self.entries[name])
        pieces = (self._rows(name, first, min(first + step, rows)) for first in range(0, rows, step))
        return torch.stack([torch.ops.nvfp4.amax(piece) for piece in pieces]).amax()


def chosen_linears(
    source: Checkpoint, exclude: Sequence[str], include: Sequence[str], experts: bool = False
) -> dict[str, Entry]:
    """What is quantized, by name; a warning names weights that would be but for their size or dtype.

    With ``experts``, those of gpt-oss and Llama 4 too, which are one tensor: in their entries (E, N, K).

    Raises:
        ValueError: nothing is, or a pattern matches no weight.
    """
    if quantized := [name for name, entry in source.entries.items() if entry.quantized]:
        raise ValueError(
            f"{source.path}: expected dense weights, found NVFP4 in {some(quantized)}: use checkpoints.convert"
        )
    weights = {
        name: entry
        for name, entry in source.entries.items()
        if name.endswith("weight") and len(entry.shape) == 2 and not is_matched(name, NOT_LINEAR)
    }
    if experts and source.config.get("model_type") in TRANSPOSED_EXPERTS:
        weights |= {
            name: dataclasses.replace(entry, shape=(entry.shape[0], entry.shape[2], entry.shape[1]))
            for name, entry in _stacked(source).items()
        }
    for pattern in (*exclude, *include):
        if not any(is_matched(name, [pattern]) for name in weights):
            raise ValueError(
                f"{pattern!r} matches no linear of {source.path}, as there are {some(list(weights))}"
                + (
                    ": its output layer is the embedding, and quantize_lm_head=True quantizes a copy of it"
                    if is_matched(LM_HEAD, [pattern])
                    else ""
                )
            )
    chosen, unfit = {}, []
    for name, entry in weights.items():
        if is_matched(name, exclude) or (is_matched(name, LEFT_DENSE) and not is_matched(name, include)):
            continue
        if entry.dtype in HIGH_PRECISION_DTYPES and entry.shape[-1] % BLOCK == 0 and all(entry.shape):
            chosen[name] = entry if len(entry.shape) == 2 else dataclasses.replace(entry, scales=(entry.shape[0], 1))
        else:
            unfit.append(f"{name} {list(entry.shape)} {str(entry.dtype).removeprefix('torch.')}")
    if unfit:
        warnings.warn(
            f"left dense, for NVFP4 takes bfloat16, float16, float32 in columns of multiples of {BLOCK}: {some(unfit)}",
            stacklevel=4,
        )
    _warn_of_experts(source, chosen)
    if not chosen:
        raise ValueError(
            f"{source.path}: expected linears (*.weight of two dimensions) to quantize, found none"
            + (f" that NVFP4 takes (bfloat16, float16, float32): {some(unfit)}" if unfit else "")
        )
    return chosen


def _stacked(source: Checkpoint) -> dict[str, Entry]:
    """Experts that are one tensor a layer."""
    return {
        name: entry
        for name, entry in source.entries.items()
        if len(entry.shape) == 3 and name.rpartition(".")[2] in JOINED_AS
    }


def _warn_of_experts(source: Checkpoint, chosen: Mapping[str, Entry]) -> None:
    """They are most of the model."""
    stacked = [f"{name} {list(entry.shape)}" for name, entry in _stacked(source).items() if name not in chosen]
    if stacked:
        warnings.warn(
            f"experts in one tensor stay dense: {some(stacked)}. The format modelopt supports NVFP4 experts of gpt-oss "
            "and Llama 4; for other models, load the model with transformers and NVFP4TensorConfig, and save it",
            stacklevel=5,
        )


def _by_parameter(amax: Mapping[str, float], chosen: Mapping[str, Entry], source: Checkpoint) -> dict[str, float]:
    """input_amax by parameter's name, in float32; joined linears, which are fed the same, get their largest."""
    named = {name if name in chosen else f"{name}.weight": float(value) for name, value in amax.items()}
    if unknown := [name for name in named if name not in chosen]:
        raise ValueError(f"input_amax names {some(unknown)}, which {source.path} does not have or which stay dense")
    scales = {name: torch.tensor(value) / LARGEST for name, value in named.items()}  # as they will be stored
    if bad := [name for name, scale in scales.items() if not 0 < scale < math.inf]:
        raise ValueError(f"input_amax is a finite number above zero in float32, and not for {some(bad)}")
    return {name: max(named[each] for each in joined_with(name, named)) for name in named}


def _rows_of_a_chunk(entry: Entry) -> int:
    """A multiple of 128, so that chunks' block scales are whole tiles."""
    return max(CHUNK // _row_bytes(entry) // TILE_ROWS, 1) * TILE_ROWS


def _row_bytes(entry: Entry) -> int:
    return entry.shape[1] * entry.dtype.itemsize


def _nbytes(entry: Entry) -> int:
    return entry.shape[0] * _row_bytes(entry)
