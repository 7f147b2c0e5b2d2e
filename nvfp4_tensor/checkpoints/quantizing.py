"""Quantize a folder of safetensors, or a GGUF file, weight by weight, without building a model."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nvfp4_tensor._compat.frames import warn_user
from nvfp4_tensor.checkpoints.architectures import TRANSPOSED_EXPERTS
from nvfp4_tensor.checkpoints.checkpoint import Checkpoint, format_named
from nvfp4_tensor.checkpoints.io.safetensors import CHUNK
from nvfp4_tensor.checkpoints.io.strips import STRIP, in_parallel
from nvfp4_tensor.checkpoints.parts import LARGEST, LinearParts
from nvfp4_tensor.checkpoints.sources.reading import open_source
from nvfp4_tensor.checkpoints.wrappers import AsLinears, ExpertsApart, RowsApart, View, WithHead
from nvfp4_tensor.numerics import layout
from nvfp4_tensor.numerics.layout import BLOCK, TILE_ROWS
from nvfp4_tensor.numerics.random_state import rng_state_of_weight
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.quantization.model_families import JOINED_AS, LM_HEAD
from nvfp4_tensor.quantization.model_plan import Kind, Matrix, ModelPlan, plan_matrices
from nvfp4_tensor.quantization.names import is_matched, is_stored_transposed, joined_with, some
from nvfp4_tensor.tensor.arguments import stored_spec

KEPT_BYTES = 256 << 20
"""Dense weights up to this size are read once and kept for computing the amax and for quantizing; larger ones are read
twice."""


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
    """Quantize a folder of safetensors, or a GGUF file. No model is built, and memory stays under 2 GB.

    All two-dimensional weights whose columns are a multiple of 16 are quantized, except embeddings and what
    :func:`plan_matrices` leaves dense: output layers, routers, gates, weights of a few rows, and encoders of images and
    audio. They are the same as with ``quantize_model`` and ``from_pretrained``. Experts that are one tensor become one
    weight each; those of gpt-oss and Llama 4 stay one tensor, which ModelOpt's format quantizes with a per-tensor scale
    for each. Linears that servers join (q, k and v; gate and up) get one per-tensor scale, from the largest magnitude
    of the group. If a call is interrupted, the same call continues after its last complete shard.

    Args:
        src: a folder with *.safetensors, or one such file, in bfloat16, float16 or float32, or in the codes of another
            quantization (FP8, GPTQ, AWQ, bitsandbytes, compressed-tensors, torchao, MXFP4); or a GGUF file. Codes are
            decoded first, and thus rounded twice.
        dst: a path that does not exist yet. It appears when it is complete.
        to: the name of the target format in :data:`FORMATS`.
        spec: how to quantize; the default rounds to nearest. ``QuantizeSpec(four_over_six=True)`` and
            ``QuantizeSpec(scale_search=True)`` have smaller errors.
        exclude: more weights to leave dense: names of modules or parameters, with wildcards ("*.down_proj"), or "re:"
            and a regular expression. A string is one pattern.
        include: weights to quantize although the rules leave them dense ("lm_head").
        quantize_lm_head: quantize the output layer too. If it shares the embedding's weight, a copy is quantized, the
            embedding stays dense, and config.json gets ``tie_word_embeddings`` False. vLLM does not support such
            checkpoints.
        input_amax: the largest input magnitude of each linear, by parameter name
            ("model.layers.0.mlp.up_proj.weight") or module name. These linears become W4A4, others stay weight-only.
        seed: the seed of stochastic rounding; the random bits of a weight depend on the seed and on its name.
        progress: print what stays dense and why, and show a progress bar.
        options: options of the target format.

    Example::

        checkpoints.quantize("SmolLM2-135M", "SmolLM2-135M-NVFP4", spec=QuantizeSpec(four_over_six=True))

    Raises:
        ValueError: there is nothing to quantize, a pattern matches nothing, the source is invalid or already
            quantized, or the spec has a Hadamard transform or row_scaled. Nothing is written.
    """
    target = format_named(to)
    exclude, include = ((each,) if isinstance(each, str) else each for each in (exclude, include))
    source = opened = open_source(Path(src))
    with source:
        source = RowsApart(source)
        if source.config.get("model_type") not in TRANSPOSED_EXPERTS:
            source = ExpertsApart(source)
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
        opened.check_values()
        said = [*filter(None, (checkpoint.plan.left_dense(), opened.report(checkpoint.plan.quantized)))]
        if progress and said:
            print(*said, sep="\n", file=sys.stderr)
        target.write(checkpoint, Path(dst), progress=progress, **options)


class Quantized(View):
    """A dense checkpoint whose linears are quantized to NVFP4 when they are read."""

    def __init__(
        self, source: Checkpoint, spec: QuantizeSpec | None, exclude: Sequence[str], include: Sequence[str],
        input_amax: Mapping[str, float], seed: int, has_scale: Callable[[str], bool], experts: bool,
    ) -> None:  # fmt: skip
        """
        Args:
            has_scale: whether a weight, given by name, can have a per-tensor scale other than 1.
            experts: whether the target format supports experts in one tensor.
            others: as in :func:`quantize`.
        """
        super().__init__(source)
        self.spec, self.seed = stored_spec(spec), seed
        if self.spec.hadamard_sign is not None:
            raise ValueError(
                "no checkpoint format supports Hadamard-transformed weights: pass a spec without hadamard_sign"
            )
        if self.spec.row_scaled:
            raise ValueError(
                "checkpoint formats have one per-tensor scale per weight: pass a spec without row_scaled, or quantize "
                "the model in memory and torch.save its state_dict()"
            )
        self.plan = plan_folder(source, exclude, include, experts)
        chosen, model_type = dict.fromkeys(self.plan.quantized), source.config.get("model_type")
        if transposed := [name for name in chosen if is_stored_transposed(model_type, name)]:
            self.source = AsLinears(source, transposed)
        self.made = chosen
        self._unscaled = {name for name in chosen if not has_scale(name)}
        self._input_amax = _by_parameter(input_amax, chosen, source)
        self._amax: dict[tuple[str, ...], Tensor] = {}
        self._kept: dict[str, Tensor] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)
        for name in chosen:
            static, shape = name in self._input_amax, self.plan[name].shape
            self.entries[name] = dataclasses.replace(
                source.entries[name], shape=shape, scales=(shape[0], 1) if len(shape) == 3 else (), quantized=True,
                quantizes_activations=static, has_input_scale=static,
            )  # fmt: skip

    def identity(self) -> list[Any] | None:
        inner = super().identity()
        chosen = [sorted(each) for each in (self._unscaled, self.plan.quantized, self._input_amax.items())]
        return None if inner is None else [*inner, str(self.spec), self.spec.pack(), self.seed, *chosen]

    def per_tensor_scale(self, name: str) -> Tensor:
        if len(self.entries[name].shape) == 3:
            return self.linear(name).per_tensor_scale
        amax = self._shared_amax(name)
        return torch.where(amax == 0, torch.ones((), dtype=torch.float32), amax / self.spec.largest_value)

    def make(self, name: str) -> LinearParts:
        """Quantize a weight (N, K), or experts one by one, bitwise equal to ``quantize`` and ``quantize_experts``.

        Experts are stored as (E, K, N). A weight that is not kept is in memory some rows at a time.
        """
        entry, is_experts = self.entries[name], len(self.entries[name].shape) == 3
        *leading, columns = entry.shape
        qdata = torch.empty((*leading, columns // 2), dtype=torch.uint8)
        scale = torch.empty((*leading, columns // BLOCK), dtype=torch.float8_e4m3fn)
        amax = None if is_experts and name not in self._unscaled else self._shared_amax(name)
        rng_state, factors, first, row = self._rng_state(name), [], 0, 0
        step, outputs = _rows_of_strip(columns), (qdata.view(-1, columns // 2), scale.view(-1, columns // BLOCK))

        def quantized(x: Tensor, own: Tensor, row: int, *out: Tensor) -> Tensor:
            codes, blocks, factor = torch.ops.nvfp4.quantize(x, own, rng_state, self.spec.pack(), row, 0, columns)
            out[0].copy_(codes)
            out[1].copy_(layout.unswizzle(blocks, len(x), columns // BLOCK))
            return factor

        for chunk in self._chunks(name):
            x = chunk.mT.contiguous() if is_experts else chunk
            own = _amax(x) if amax is None else amax
            strips = [each.split(step) for each in (x, *(out[first : first + len(x)] for out in outputs))]
            rows = range(row, row + len(x), step)
            factors.append(in_parallel(quantized, strips[0], [own] * len(rows), rows, *strips[1:])[0])
            first, row = first + len(x), row + layout.ceil_to(len(x), self.spec.block_rows)
        input_amax = torch.tensor(self._input_amax[name], dtype=torch.float32) if entry.has_input_scale else None
        return LinearParts(
            qdata=qdata,
            scale=scale,
            per_tensor_scale=torch.stack(factors).reshape(-1, 1) if is_experts else factors[0],
            columns=columns,
            quantizes_activations=entry.quantizes_activations,
            input_scale=None if input_amax is None else input_amax / LARGEST,
            input_amax=input_amax,
        )

    def _rng_state(self, name: str) -> Tensor | None:
        return rng_state_of_weight(self.seed, name, torch.device("cpu")) if self.spec.is_stochastic else None

    def _chunks(self, name: str) -> Iterable[Tensor]:
        """Read a dense weight as a whole if it is kept, one expert at a time, or some full tiles of rows at a time.

        A chunk that is not kept is valid until the next one is read.
        """
        if name in self._kept:
            return [self._kept[name]]
        entry = self.entries[name]
        row_bytes = entry.shape[1] * entry.dtype.itemsize  # of experts (E, N, K), which are stored as (E, K, N), too
        rows = entry.shape[2] if len(entry.shape) == 3 else max(CHUNK // row_bytes // TILE_ROWS, 1) * TILE_ROWS
        self._grow(rows * row_bytes)
        return self.source.chunks(name, rows, self._buffer)

    def _grow(self, nbytes: int) -> None:
        """Enlarge the shared buffer. Allocating new memory for each weight would take as long as reading it."""
        if len(self._buffer) < nbytes:
            self._buffer = torch.empty(nbytes, dtype=torch.uint8)

    def _shared_amax(self, name: str) -> Tensor:
        """Return the amax of the weights that servers join with this one, and keep the weights if they are small."""
        if name in self._unscaled:
            return torch.tensor(self.spec.largest_value, dtype=torch.float32)
        group = self.plan[name].group
        if group not in self._amax:
            self._keep(group)
            every = [_amax(chunk) for each in group for chunk in self._chunks(each)]
            self._amax = {group: torch.stack(every).amax()}
        return self._amax[group]

    def _keep(self, group: tuple[str, ...]) -> None:
        """Read and keep the weights of a group, if they are small."""
        self._kept.clear()
        sizes = {name: self.entries[name].nbytes for name in group}
        if sum(sizes.values()) > KEPT_BYTES:
            return
        self._grow(sum(sizes.values()))
        offset = 0
        for name, nbytes in sizes.items():
            (self._kept[name],) = self.source.chunks(name, self.entries[name].shape[0], self._buffer[offset:])
            offset += nbytes


def _rows_of_strip(columns: int) -> int:
    return max(STRIP // columns // TILE_ROWS, 1) * TILE_ROWS


def _amax(x: Tensor) -> Tensor:
    """Return the largest magnitude of a matrix."""
    strips = x.split(_rows_of_strip(x.shape[1]))
    return torch.stack(in_parallel(torch.ops.nvfp4.amax, strips)).amax()


def plan_folder(source: Checkpoint, exclude: Sequence[str], include: Sequence[str], experts: bool) -> ModelPlan:
    """Plan which weights of a dense checkpoint are quantized. Warn of weights whose size or dtype does not allow it.

    With ``experts``, include the experts of gpt-oss and Llama 4 that are one tensor, with shapes (E, N, K)."""
    if quantized := [name for name, entry in source.entries.items() if entry.quantized]:
        raise ValueError(
            f"{source.path}: expected dense weights, found NVFP4 in {some(quantized)}: use checkpoints.convert"
        )
    try:
        plan = plan_matrices(
            _matrices(source, experts), exclude=exclude, include=include, drafters=_drafters(source),
            where=str(source.path),
        )  # fmt: skip
    except ValueError as error:
        if any(is_matched(LM_HEAD, [pattern]) for pattern in (*exclude, *include)):
            error.args = (f"{error}: its output layer is the embedding, and quantize_lm_head=True quantizes a copy",)
        raise
    unfit = [
        f"{name} {list(plan[name].shape)} {source.entries[name].kind}" for name in plan.dense if plan[name].is_unfit
    ]
    if unfit:
        warn_user(
            f"left dense, because NVFP4 needs bfloat16, float16 or float32 and columns in multiples of {BLOCK}: "
            f"{some(unfit)}",
        )
    stacked = [f"{name} {list(plan[name].shape)}" for name in plan.dense if plan[name].reason == _STACKED]
    if stacked:  # they are most of the model
        warn_user(
            f"experts in one tensor stay dense: {some(stacked)}. The format modelopt supports NVFP4 experts of gpt-oss "
            "and Llama 4; for other models, load the model with transformers and NVFP4TensorConfig, and save it",
        )
    if not plan.quantized:
        raise ValueError(
            f"{source.path}: expected linears (two-dimensional *.weight) to quantize, found none: {plan.candidates()}"
        )
    return plan


_STACKED = "experts in one tensor"
_LAYER = re.compile(r"(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\.")


def _drafters(source: Checkpoint) -> list[str]:
    """Return the weights of the layers behind the model's own, which predict several tokens (MTP)."""
    config = source.config.get("text_config", source.config)
    layers = config.get("num_hidden_layers") if isinstance(config, dict) else None
    if not isinstance(layers, int):
        return []
    return [name for name in source.entries if (found := _LAYER.match(name)) and int(found[1]) >= layers]


def _matrices(source: Checkpoint, experts: bool) -> list[Matrix]:
    """Return the weights of linears and experts of a dense checkpoint, by names, shapes and config.json alone."""
    model_type = source.config.get("model_type")
    has_experts = any("expert" in key for key in source.config)
    supported = experts and model_type in TRANSPOSED_EXPERTS
    matrices = []
    for name, entry in source.entries.items():
        shape = entry.shape
        if name.endswith("weight") and len(shape) == 2:
            shape = shape[::-1] if is_stored_transposed(model_type, name) else shape
            matrices.append(Matrix(name, shape, entry.dtype))
        elif len(shape) == 3 and name.rpartition(".")[2] in JOINED_AS:
            shape = (shape[0], shape[2], shape[1]) if supported else shape
            matrices.append(Matrix(name, shape, entry.dtype, Kind.EXPERTS, "" if supported else _STACKED))
        elif (
            has_experts and len(shape) == 3 and name.endswith(".weight") and shape[1] >= BLOCK and not shape[2] % BLOCK
        ):
            matrices.append(Matrix(name, shape, entry.dtype, Kind.EXPERTS, _STACKED))  # GraniteMoE, JetMoE, Aria
    return matrices


def _by_parameter(amax: Mapping[str, float], chosen: Container[str], source: Checkpoint) -> dict[str, float]:
    """Return input_amax by parameter name. Joined linears, which have the same input, get the largest of their
    values."""
    named = {name if name in chosen else f"{name}.weight": float(value) for name, value in amax.items()}
    if unknown := [name for name in named if name not in chosen]:
        raise ValueError(f"input_amax names {some(unknown)}, which are not in {source.path} or stay dense")
    scales = {name: torch.tensor(value, dtype=torch.float32) / LARGEST for name, value in named.items()}  # as stored
    if bad := [name for name, scale in scales.items() if not 0 < scale < math.inf]:
        raise ValueError(f"input_amax of {some(bad)}: expected a finite number above zero in float32")
    return {name: max(named[each] for each in joined_with(name, named)) for name in named}
