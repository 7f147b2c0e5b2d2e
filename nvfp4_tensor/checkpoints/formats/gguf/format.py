"""GGUF, the file format of llama.cpp, and its writer. NVFP4 is tensor type 40.

The per-tensor scale of ``blk.0.ffn_up.weight`` is the tensor ``blk.0.ffn_up.scale``. The experts of a layer are one
tensor, ``blk.0.ffn_up_exps.weight`` (E, N, K), and ``blk.0.ffn_up_exps.scale`` has one scale per expert.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from nvfp4_tensor._compat.frames import warn_user
from nvfp4_tensor.checkpoints.architectures import GGUF_ARCHITECTURES
from nvfp4_tensor.checkpoints.checkpoint import Checkpoint, Entry, Format
from nvfp4_tensor.checkpoints.formats import fp8
from nvfp4_tensor.checkpoints.formats.gguf.blocks import SUPER_BLOCK, pack_blocks
from nvfp4_tensor.checkpoints.formats.gguf.experts import JoinedExperts, split_experts
from nvfp4_tensor.checkpoints.formats.gguf.names import (
    FREQUENCIES,
    SCALING,
    TensorNames,
    architecture_of,
    expert_of,
    rope_tensors,
    row_order,
    settings_of,
    tensor_sort_key,
    written_scaling,
)
from nvfp4_tensor.checkpoints.formats.gguf.reading import NEEDS, PLAIN, VECTORS, WRITTEN, GGUFCheckpoint
from nvfp4_tensor.checkpoints.formats.gguf.tokenizer import add_tokenizer
from nvfp4_tensor.checkpoints.formats.mlx import folds_exactly, with_scale_of_one
from nvfp4_tensor.checkpoints.io.resumable_write import check_is_new, temporary
from nvfp4_tensor.checkpoints.io.sidecar import check_sidecar, lost_factors, write_factors
from nvfp4_tensor.checkpoints.parts import nan_blocks
from nvfp4_tensor.checkpoints.understood import check_no_pre_scales
from nvfp4_tensor.checkpoints.wrappers import View, of_whole_model, with_conv1d_transposed
from nvfp4_tensor.quantization.names import natural, some

if TYPE_CHECKING:
    import gguf

_MAGIC = b"GGUF"
_STORED = {dtype: name for name, dtype in PLAIN.items()}
DENSE_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
"""The values of ``dense`` in :meth:`GGUF.write`: the types that the package gguf can quantize to."""

_DENSE_BLOCK = 32


class GGUF(Format):
    """llama.cpp's format, for the model families of :data:`GGUF_ARCHITECTURES`."""

    name = "gguf"
    is_file = True
    is_served = False
    holds_experts = True  # of gpt-oss
    holds_embeddings = True

    def detect(self, path: Path) -> bool:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC

    def read(self, path: Path) -> Checkpoint:
        if not self.detect(path):
            raise ValueError(f"{path}: expected a GGUF file, found one that does not start with {_MAGIC.decode()}")
        checkpoint = GGUFCheckpoint(path)
        if checkpoint.config["model_type"] == "gpt_oss":
            return JoinedExperts(checkpoint)
        return with_conv1d_transposed(checkpoint)

    def has_scale(self, checkpoint: Checkpoint, name: str, options: dict[str, Any]) -> bool:
        kinds = [each for each in GGUF_ARCHITECTURES if each.model_type == checkpoint.config.get("model_type")]
        return not any(each.ignores_scale(name) for each in kinds)

    def write(
        self,
        checkpoint: Checkpoint,
        path: Path,
        *,
        progress: bool = True,
        dense: str | None = None,
        tokenizer: Any = "own",
        lossy: bool = False,
        **options: Any,
    ) -> None:
        """Write ``checkpoint`` to the file ``path``, which appears when it is complete.

        Args:
            dense: the type of matrices that are not quantized, one of :data:`DENSE_TYPES`. By default, they keep their
                dtype. Vectors (norms, biases) are float32, as llama.cpp requires.
            tokenizer: a transformers tokenizer, a folder with one, or None for a file that runs on tokens only. The
                default is the tokenizer of the checkpoint, with a warning if it has none.
            lossy: if llama.cpp ignores a per-tensor scale (of feed-forward weights, in Qwen2 and others) that cannot be
                folded into block scales exactly, quantize the decoded values again.

        Raises:
            ValueError: the architecture or the rope scaling is not supported, or a weight has columns that are not a
                multiple of 64, one per-tensor scale per row, NaN blocks, or an unknown name. Nothing is written.
        """
        if options:
            raise ValueError(f"GGUF has no option {', '.join(options)}, only dense, tokenizer and lossy")
        if dense is not None and dense.upper() not in DENSE_TYPES:
            raise ValueError(f"dense: expected one of {', '.join(DENSE_TYPES)}, found {dense!r}")
        if importlib.util.find_spec("gguf") is None:
            raise ImportError(NEEDS)
        path = Path(path)
        check_is_new(path, checkpoint, is_file=True)
        check_sidecar(path)
        check_no_pre_scales(checkpoint.entries, self.name)
        fp8.check(checkpoint.entries, self.name)
        _Writer(checkpoint, path, dense.upper() if dense else None, tokenizer, lossy).run(progress)


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """A tensor of the file: a weight, or that of all experts of a layer, which are alike.

    Attributes:
        name: its name in the file.
        sources: the names in the checkpoint.
        entry: the entry of the first one.
        kind: the type, one of gguf.GGMLQuantizationType.
    """

    name: str
    sources: list[str]
    entry: Entry
    kind: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape if expert_of(self.sources[0]) is None else (len(self.sources), *self.entry.shape)

    @property
    def scales(self) -> dict[str, str]:
        """The names of the scales in the file: the per-tensor scale and the input scale, if it has them."""
        kinds = {"per_tensor_scale": "scale"} if self.entry.quantized else {}
        kinds |= {"input_scale": "input_scale"} if self.entry.has_input_scale else {}
        return {part: f"{self.name.rpartition('.')[0]}.{kind}" for part, kind in kinds.items()}


class _Writer:
    """Writes one file: first the header, then the tensors, with one tensor in memory at a time."""

    def __init__(self, checkpoint: Checkpoint, path: Path, dense: str | None, tokenizer: Any, lossy: bool) -> None:
        if checkpoint.config.get("model_type") == "gpt_oss":
            checkpoint = split_experts(checkpoint)
        if not checkpoint.config:
            raise ValueError(f"GGUF needs a transformers configuration, but {checkpoint.path or 'the model'} has none")
        self.architecture = architecture_of(checkpoint.config)
        checkpoint = of_whole_model(checkpoint, self.architecture.modules[0].partition(".")[0] + ".")
        checkpoint = with_conv1d_transposed(checkpoint)
        self.checkpoint, self.path, self.dense, self.lossy = checkpoint, path, dense, lossy
        self.settings = settings_of(checkpoint.config, self.architecture)
        self.rope = rope_tensors(checkpoint.config, self.settings)
        self.factors: dict[str, dict[str, Any]] = {}
        self.tensors = self._tensors()
        for tensor in self.tensors:
            for name in tensor.sources:
                self._check(name, checkpoint.entries[name], tensor.kind)
            self._check_experts(tensor)
        self.tokenizer = self._own_tokenizer() if isinstance(tokenizer, str) and tokenizer == "own" else tokenizer

    def run(self, progress: bool) -> None:
        import gguf

        with temporary(self.path) as file:
            writer = gguf.GGUFWriter(file, self.architecture.name)
            try:
                self._write(writer, progress)
            finally:
                writer.close()
            self.checkpoint.check_unchanged()
            write_factors(check_sidecar(self.path), self.factors)
            file.replace(self.path)

    def _write(self, writer: gguf.GGUFWriter, progress: bool) -> None:
        self._add_settings(writer)
        add_tokenizer(writer, self.tokenizer, int(self.settings["vocab_size"]))
        total = self._add_tensors(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        title = f"writing {self.path.name}"
        with tqdm(total=total, desc=title, unit="B", unit_scale=True, disable=not progress) as bar:
            for factors in self.rope.values():
                writer.write_tensor_data(factors.numpy())
            for tensor in self.tensors:
                for data in self._quantized(tensor) if tensor.entry.quantized else [self._dense(tensor)]:
                    writer.write_tensor_data(data)
                    bar.update(data.nbytes)

    def _own_tokenizer(self) -> Any:
        source = self.checkpoint
        while isinstance(source, View):
            source = source.source
        if isinstance(source, GGUFCheckpoint):
            return source.fields
        path = source.path
        if path is None or not (path / "tokenizer.json").is_file():
            warn_user(
                f"{self.path.name} gets no tokenizer, because {path or 'a model in memory'} has none, so llama.cpp can "
                "run it on tokens only: pass tokenizer=FOLDER to add one, or tokenizer=None to omit it without a "
                "warning",
            )
            return None
        return path

    def _tensors(self) -> list[_Tensor]:
        """Return the tensors in the order of the file."""
        config, entries, names = self.checkpoint.config, self.checkpoint.entries, TensorNames(self.architecture)
        found: dict[str, list[str]] = {}
        for name, entry in entries.items():
            if name == "lm_head.weight" and config.get("tie_word_embeddings") and not entry.quantized:
                continue  # llama.cpp uses the embedding
            gguf_name = names.in_file(name)
            if gguf_name is None:
                raise ValueError(
                    f"{name} is not a tensor of llama.cpp's {self.architecture.name}: remove it from the checkpoint"
                )
            found.setdefault(gguf_name, []).append(name)
        untied = config.get("tie_word_embeddings") is False
        if untied and "token_embd.weight" in found and "output.weight" not in found:
            raise ValueError(
                f"{self.checkpoint.path or 'the model'} has no lm_head.weight, and llama.cpp would use the embedding, "
                "which config.json does not share: save the model with its output layer, or set tie_word_embeddings"
            )
        tensors = []
        for gguf_name in sorted(found, key=tensor_sort_key):
            sources = sorted(found[gguf_name], key=natural)
            entry = entries[sources[0]]
            tensors.append(_Tensor(gguf_name, sources, entry, self._kind(gguf_name, entry)))
        return tensors

    def _kind(self, gguf_name: str, entry: Entry) -> str:
        """Return the type of a tensor. Vectors are float32, as llama.cpp requires; routers keep their dtype."""
        if entry.quantized:
            return "NVFP4"
        if len(entry.shape) < 2 and entry.dtype in _STORED:
            return "F32"
        own = _STORED.get(entry.dtype, "")
        return own if not own or self.dense is None or ".ffn_gate_inp." in gguf_name else self.dense

    def _check_experts(self, tensor: _Tensor) -> None:
        """Raise a ValueError unless all experts of a layer exist and are alike, because they are stored as one
        tensor."""
        experts, entries = [expert_of(name) for name in tensor.sources], self.checkpoint.entries
        if experts == [None]:
            return
        count = int(self.settings["expert_count"])
        if experts != list(range(count)):
            raise ValueError(
                f"{tensor.name} needs experts 0 to {count - 1}, from config.json, found {some(tensor.sources)}"
            )
        shard = tensor.entry.shard
        others = [n for n in tensor.sources if dataclasses.replace(entries[n], shard=shard) != tensor.entry]
        if others:
            raise ValueError(
                f"{tensor.name} stores all experts as one type, but {some(others)} differ from {tensor.sources[0]} in "
                "shape, dtype or quantization"
            )

    def _check(self, name: str, entry: Entry, kind: str) -> None:
        self._order(name)
        columns = entry.shape[-1] if entry.shape else 1
        if not entry.quantized:
            if entry.dtype not in _STORED:
                raise ValueError(f"{name} is {entry.dtype}, but GGUF supports float32, float16 and bfloat16")
            if kind not in PLAIN and columns % _DENSE_BLOCK:
                raise ValueError(f"{name} has {columns} columns, but {kind} needs a multiple of {_DENSE_BLOCK}")
            return
        if len(entry.shape) != 2:
            raise ValueError(f"{name} has shape {entry.shape}, but NVFP4 in GGUF needs matrices (N, K)")
        if columns % SUPER_BLOCK:
            raise ValueError(
                f"{name} has {columns} columns, but NVFP4 in GGUF needs a multiple of {SUPER_BLOCK}: leave it dense "
                "with exclude=[...]"
            )
        if entry.scales not in ((), (1,)):
            raise ValueError(
                f"{name} has per-tensor scales {entry.scales}, but GGUF has only one: split joined linears first"
            )
        bias = name.removesuffix("weight") + "bias"
        scaled = ".mlp." in name and self.architecture.scales_ffn
        if scaled and bias in self.checkpoint.entries and expert_of(name) is None:
            raise ValueError(f"llama.cpp does not support NVFP4 feed-forward weights with a bias: leave {name} dense")
        if self.architecture.ignores_scale(name) and not (self.lossy or folds_exactly(self.checkpoint, name)):
            raise ValueError(
                f"llama.cpp ignores the per-tensor scales of {self.architecture.name}'s feed-forward weights, and that "
                f"of {name} cannot be folded into its block scales exactly: quantize the dense model for GGUF, which "
                "gives it a scale of 1, or pass lossy=True"
            )

    def _add_settings(self, writer: gguf.GGUFWriter) -> None:
        import gguf

        config = self.checkpoint.config
        writer.add_type("model")
        writer.add_name(str(config.get("_name_or_path") or self.path.stem))
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        quantized = [tensor for tensor in self.tensors if tensor.entry.quantized]
        matrices = (self._kind("", entry) for entry in self.checkpoint.entries.values() if len(entry.shape) > 1)
        kind = "NVFP4" if quantized else next(matrices, "F32")
        writer.add_file_type(gguf.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"])
        for key, value in self.settings.items():
            key = f"{self.architecture.name}.{key}"
            if isinstance(value, str):
                writer.add_string(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            else:
                writer.add_uint32(key, value)
        for dtype, key in VECTORS.items():  # they are float32 in the file, and get their dtype back when read
            vectors = [each.name for each in self.tensors if len(each.entry.shape) < 2 and each.entry.dtype == dtype]
            if vectors:
                writer.add_array(key, vectors)
        writer.add_uint32(WRITTEN, 1)
        if FREQUENCIES in self.rope:
            writer.add_string(SCALING, written_scaling(config))
        if quantized:  # which weights are multiplied by 4-bit activations, on hardware that supports it
            writer.add_array("general.tensor_extra.name", [tensor.name for tensor in quantized])
            activations = [tensor.entry.quantizes_activations for tensor in quantized]
            writer.add_array("general.tensor_extra.prec_a4", activations)

    def _add_tensors(self, writer: gguf.GGUFWriter) -> int:
        """Add every tensor to the header, in the order of the file, and return their size in bytes."""
        import gguf

        total, types = 0, gguf.GGMLQuantizationType
        shapes = [(name, tuple(factors.shape), "F32") for name, factors in self.rope.items()]
        for tensor in self.tensors:
            shapes.append((tensor.name, tensor.shape, tensor.kind))
            shapes += [(name, (len(tensor.sources),), "F32") for name in tensor.scales.values()]
        for name, shape, kind in shapes:
            block, size = gguf.GGML_QUANT_SIZES[types[kind]]
            nbytes = math.prod(shape) // block * size
            writer.add_tensor_info(name, shape, np.dtype(np.float32), nbytes, types[kind])
            total += nbytes
        return total

    def _quantized(self, tensor: _Tensor) -> Iterator[np.ndarray]:
        """Yield the blocks of a weight, then its scales."""
        blocks: list[Tensor] = []
        scales: dict[str, list[Tensor]] = {part: [] for part in tensor.scales}
        for name in tensor.sources:
            parts = self.checkpoint.linear(name)
            if self.architecture.ignores_scale(name):
                parts = with_scale_of_one(parts)
            if nan_blocks(parts):
                raise ValueError(f"{name} has {nan_blocks(parts)} NaN blocks, which llama.cpp reads as zeros")
            if lost := lost_factors(parts, stores_divisors=False):
                self.factors[name] = lost
            for part, values in scales.items():
                values.append(getattr(parts, part).reshape(1))
            data, order = pack_blocks(parts.qdata, parts.scale), self._order(name)
            blocks.append(data if order is None else data[order])
        for tensors in (blocks, *scales.values()):
            yield _joined(tensors).numpy()

    def _dense(self, tensor: _Tensor) -> np.ndarray:
        """Return the bytes of a dense tensor."""
        import gguf

        arrays = []
        for name in tensor.sources:
            values, order = self.checkpoint.dense(name), self._order(name)
            values = values if order is None else values[order]
            if self.architecture.norm_offset and name.endswith("norm.weight"):
                values = values.float() + self.architecture.norm_offset
            if tensor.kind in PLAIN:
                values = values.to(PLAIN[tensor.kind]).contiguous()
                arrays.append(values.view(torch.int16) if tensor.kind == "BF16" else values)
            else:
                data = gguf.quants.quantize(values.float().numpy(), gguf.GGMLQuantizationType[tensor.kind])
                arrays.append(torch.from_numpy(data))
        return _joined(arrays).numpy()

    def _order(self, name: str) -> Tensor | None:
        entry = self.checkpoint.entries[name]
        return row_order(name, math.prod(entry.shape[:1]), self.checkpoint.config, self.architecture)


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


FORMAT = GGUF()
