"""GGUF, the file format of llama.cpp, and its writer. NVFP4 is tensor type 40.

The per-tensor scale of ``blk.0.ffn_up.weight`` is the tensor ``blk.0.ffn_up.scale``. The experts of a layer are one
tensor, ``blk.0.ffn_up_exps.weight`` (E, N, K), and ``blk.0.ffn_up_exps.scale`` has one scale per expert.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from nvfp4_tensor.checkpoints.architectures import GGUF_ARCHITECTURES
from nvfp4_tensor.checkpoints.checkpoint import Checkpoint, Entry, Format
from nvfp4_tensor.checkpoints.formats.gguf.blocks import SUPER_BLOCK, pack_blocks
from nvfp4_tensor.checkpoints.formats.gguf.experts import JoinedExperts, SplitExperts
from nvfp4_tensor.checkpoints.formats.gguf.names import (
    FREQUENCIES,
    SCALING,
    architecture_of,
    expert_of,
    rope_tensors,
    row_order,
    settings_of,
    tensor_sort_key,
    to_gguf_name,
    written_scaling,
)
from nvfp4_tensor.checkpoints.formats.gguf.reading import NEEDS, PLAIN, VECTORS, WRITTEN, GGUFCheckpoint
from nvfp4_tensor.checkpoints.formats.gguf.tokenizer_writing import add_tokenizer
from nvfp4_tensor.checkpoints.formats.mlx import folds_exactly, with_scale_of_one
from nvfp4_tensor.checkpoints.io.resumable_write import check_apart, check_is_new, temporary
from nvfp4_tensor.checkpoints.io.sidecar import check_sidecar, lost_factors, write_factors
from nvfp4_tensor.checkpoints.parts import nan_blocks
from nvfp4_tensor.checkpoints.wrappers import OfWholeModel, View, with_conv1d_transposed
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
        check_is_new(path, is_file=True)
        check_apart(checkpoint, path.with_name(path.name + ".tmp"))
        check_sidecar(path)
        _Writer(checkpoint, path, dense.upper() if dense else None, tokenizer, lossy).run(progress)


class _Writer:
    """Writes one file: first the header, then the tensors, with one tensor in memory at a time."""

    def __init__(self, checkpoint: Checkpoint, path: Path, dense: str | None, tokenizer: Any, lossy: bool) -> None:
        if checkpoint.config.get("model_type") == "gpt_oss":
            checkpoint = SplitExperts(checkpoint)
        if not checkpoint.config:
            raise ValueError(f"GGUF needs a transformers configuration, but {checkpoint.path or 'the model'} has none")
        self.architecture = architecture_of(checkpoint.config)
        checkpoint = OfWholeModel(checkpoint, self.architecture.layers.partition(".")[0] + ".")
        checkpoint = with_conv1d_transposed(checkpoint)
        self.checkpoint, self.path, self.dense, self.lossy = checkpoint, path, dense, lossy
        self.settings = settings_of(checkpoint.config, self.architecture)
        self.rope = rope_tensors(checkpoint.config, self.settings)
        self.factors: dict[str, dict[str, Any]] = {}
        self.tensors = self._tensors()
        for gguf_name, names in self.tensors.items():
            for name in names:
                self._check(name, checkpoint.entries[name])
                self._order(name)
            self._check_experts(gguf_name, names)
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
        add_tokenizer(writer, self.tokenizer, self.settings_int("vocab_size"))
        plan = list(self._plan(writer))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        total = sum(size for _, size in plan)
        with tqdm(
            total=total, desc=f"writing {self.path.name}", unit="B", unit_scale=True, disable=not progress
        ) as bar:
            for name, size in plan:
                for data in self._data(name):
                    writer.write_tensor_data(data)
                bar.update(size)

    def settings_int(self, key: str) -> int:
        """Return an integer setting."""
        return int(self.settings[key])

    def _own_tokenizer(self) -> Any:
        source = self.checkpoint
        while isinstance(source, View):
            source = source.source
        if isinstance(source, GGUFCheckpoint):
            return source.fields
        path = source.path
        if path is None or not (path / "tokenizer.json").is_file():
            warnings.warn(
                f"{self.path.name} gets no tokenizer, because {path or 'a model in memory'} has none, so llama.cpp can "
                "run it on tokens only: pass tokenizer=FOLDER to add one, or tokenizer=None to omit it without a "
                "warning",
                stacklevel=5,
            )
            return None
        return path

    def _tensors(self) -> dict[str, list[str]]:
        """Return by name in the file: the weight, or the weights of all experts in order."""
        tensors: dict[str, list[str]] = {}
        for name, entry in self.checkpoint.entries.items():
            if name == "lm_head.weight" and self.checkpoint.config.get("tie_word_embeddings") and not entry.quantized:
                continue  # llama.cpp uses the embedding
            gguf_name = to_gguf_name(name, self.architecture)
            if gguf_name is None or (expert_of(name) is not None and not self.architecture.experts):
                raise ValueError(
                    f"{name} is not a tensor of llama.cpp's {self.architecture.name}: remove it from the checkpoint"
                )
            tensors.setdefault(gguf_name, []).append(name)
        untied = self.checkpoint.config.get("tie_word_embeddings") is False
        if untied and "token_embd.weight" in tensors and "output.weight" not in tensors:
            raise ValueError(
                f"{self.checkpoint.path or 'the model'} has no lm_head.weight, and llama.cpp would use the embedding, "
                "which config.json does not share: save the model with its output layer, or set tie_word_embeddings"
            )
        in_order = sorted(tensors.items(), key=lambda item: tensor_sort_key(item[0]))
        return {gguf_name: sorted(names, key=natural) for gguf_name, names in in_order}

    def _check_experts(self, gguf_name: str, names: list[str]) -> None:
        """Raise a ValueError unless all experts of a layer exist and are alike, because they are stored as one
        tensor."""
        experts = [expert_of(name) for name in names]
        if experts == [None]:
            return
        count = self.settings_int("expert_count")
        if experts != list(range(count)):
            raise ValueError(f"{gguf_name} needs experts 0 to {count - 1}, from config.json, found {some(names)}")
        first = self.checkpoint.entries[names[0]]
        others = [n for n in names if dataclasses.replace(self.checkpoint.entries[n], shard=first.shard) != first]
        if others:
            raise ValueError(
                f"{gguf_name} stores all experts as one type, but {some(others)} differ from {names[0]} in shape, "
                "dtype or quantization"
            )

    def _check(self, name: str, entry: Entry) -> None:
        if not entry.quantized:
            if entry.dtype not in _STORED:
                raise ValueError(f"{name} is {entry.dtype}, but GGUF supports float32, float16 and bfloat16")
            kind = self._dense_type(entry, to_gguf_name(name, self.architecture) or "")
            if kind not in PLAIN and entry.shape[-1] % _DENSE_BLOCK:
                raise ValueError(f"{name} has {entry.shape[-1]} columns, but {kind} needs a multiple of {_DENSE_BLOCK}")
            return
        if len(entry.shape) != 2:
            raise ValueError(f"{name} has shape {entry.shape}, but NVFP4 in GGUF needs matrices (N, K)")
        if entry.shape[-1] % SUPER_BLOCK:
            raise ValueError(
                f"{name} has {entry.shape[-1]} columns, but NVFP4 in GGUF needs a multiple of {SUPER_BLOCK}: leave it "
                "dense with exclude=[...]"
            )
        if entry.scales not in ((), (1,)):
            raise ValueError(
                f"{name} has per-tensor scales {entry.scales}, but GGUF has only one: split joined linears first"
            )
        if ".mlp." in name:
            self._check_ffn(name)

    def _check_ffn(self, name: str) -> None:
        """Raise a ValueError for feed-forward weights with which llama.cpp computes wrong numbers or aborts."""
        bias = name.removesuffix("weight") + "bias"
        if bias in self.checkpoint.entries and expert_of(name) is None and self.architecture.scales_ffn:
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
        quantized = {gguf_name: self._entry(gguf_name) for gguf_name in self.tensors}
        quantized = {gguf_name: entry for gguf_name, entry in quantized.items() if entry.quantized}
        writer.add_file_type(self._file_type(bool(quantized)))
        for key, value in self.settings.items():
            key = f"{self.architecture.name}.{key}"
            if isinstance(value, str):
                writer.add_string(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            else:
                writer.add_uint32(key, value)
        for dtype, kind in VECTORS.items():  # they are float32 in the file, and get their dtype back when read
            if names := [gguf_name for gguf_name in self.tensors if self._is_vector(gguf_name, dtype)]:
                writer.add_array(kind, names)
        writer.add_uint32(WRITTEN, 1)
        if FREQUENCIES in self.rope:
            writer.add_string(SCALING, written_scaling(config))
        if quantized:  # which weights are multiplied by 4-bit activations, on hardware that supports it
            values = [entry.quantizes_activations for entry in quantized.values()]
            writer.add_array("general.tensor_extra.name", list(quantized))
            writer.add_array("general.tensor_extra.prec_a4", values)

    def _is_vector(self, gguf_name: str, dtype: torch.dtype) -> bool:
        entry = self._entry(gguf_name)
        return len(entry.shape) < 2 and entry.dtype == dtype

    def _file_type(self, quantized: bool) -> gguf.LlamaFileType:
        import gguf

        matrices = (entry for entry in self.checkpoint.entries.values() if len(entry.shape) > 1)
        kind = "NVFP4" if quantized else next((self._dense_type(entry) for entry in matrices), "F32")
        return gguf.LlamaFileType.ALL_F32 if kind == "F32" else gguf.LlamaFileType[f"MOSTLY_{kind}"]

    def _plan(self, writer: gguf.GGUFWriter) -> Iterator[tuple[str, int]]:
        """Add every tensor to the header; yield (name, bytes) of all except scales, in the order of the file."""
        import gguf

        float32, types = np.dtype(np.float32), gguf.GGMLQuantizationType
        for name, factors in self.rope.items():
            writer.add_tensor_info(name, factors.shape, float32, 4 * factors.numel(), types.F32)
            yield name, 4 * factors.numel()
        for gguf_name, names in self.tensors.items():
            entry = self._entry(gguf_name)
            kind = types.NVFP4 if entry.quantized else types[self._dense_type(entry, gguf_name)]
            block, size = gguf.GGML_QUANT_SIZES[kind]
            shape = entry.shape if expert_of(names[0]) is None else (len(names), *entry.shape)
            nbytes = math.prod(shape) // block * size
            writer.add_tensor_info(gguf_name, shape, float32, nbytes, kind)
            for sidecar in self._sidecars(entry):
                scale, many = f"{gguf_name.rpartition('.')[0]}.{sidecar}", len(names)
                writer.add_tensor_info(scale, (many,), float32, 4 * many, types.F32)
            yield gguf_name, nbytes

    def _entry(self, gguf_name: str) -> Entry:
        """Return the entry of the weight, or of the first of its experts, which are alike."""
        return self.checkpoint.entries[self.tensors[gguf_name][0]]

    def _dense_type(self, entry: Entry, gguf_name: str = "") -> str:
        """Return the type of a dense tensor. Vectors are float32, as llama.cpp requires; routers keep their dtype."""
        if len(entry.shape) < 2:
            return "F32"
        return _STORED[entry.dtype] if self.dense is None or ".ffn_gate_inp." in gguf_name else self.dense

    @staticmethod
    def _sidecars(entry: Entry) -> list[str]:
        if not entry.quantized:
            return []
        return ["scale", "input_scale"] if entry.has_input_scale else ["scale"]

    def _data(self, gguf_name: str) -> Iterator[np.ndarray]:
        """Yield the bytes of a tensor, then its scales."""
        if gguf_name in self.rope:
            yield self.rope[gguf_name].numpy()
            return
        names, entry = self.tensors[gguf_name], self._entry(gguf_name)
        if not entry.quantized:
            yield _stacked(self._rounded(name, entry, gguf_name) for name in names)
            return
        scales: dict[str, list[Tensor]] = {sidecar: [] for sidecar in self._sidecars(entry)}
        yield _stacked(self._packed(name, scales) for name in names)
        for values in scales.values():
            yield torch.stack(values).view(-1).float().numpy()

    def _packed(self, name: str, scales: dict[str, list[Tensor]]) -> np.ndarray:
        """Return the blocks of a weight, and append its scales to ``scales``."""
        parts = self.checkpoint.linear(name)
        if self.architecture.ignores_scale(name):
            parts = with_scale_of_one(parts)
        if nan_blocks(parts):
            raise ValueError(f"{name} has {nan_blocks(parts)} NaN blocks, which llama.cpp reads as zeros")
        if lost := lost_factors(parts, stores_divisors=False):
            self.factors[name] = lost
        for sidecar, values in scales.items():
            value = parts.per_tensor_scale if sidecar == "scale" else parts.input_scale
            assert value is not None
            values.append(value.reshape(1))
        data, order = pack_blocks(parts.qdata, parts.scale), self._order(name)
        return (data if order is None else data[order]).numpy()

    def _order(self, name: str) -> Tensor | None:
        rows = self.checkpoint.entries[name].shape[0]
        return row_order(name, rows, self.checkpoint.config, self.architecture)

    def _rounded(self, name: str, entry: Entry, gguf_name: str) -> np.ndarray:
        import gguf

        values, order = self.checkpoint.dense(name), self._order(name)
        values = values if order is None else values[order]
        kind = self._dense_type(entry, gguf_name)
        if self.architecture.norm_offset and name.endswith("norm.weight"):
            values = values.float() + self.architecture.norm_offset
        if kind in PLAIN:
            values = values.to(PLAIN[kind]).contiguous()
            return (values.view(torch.int16) if kind == "BF16" else values).numpy()
        return gguf.quants.quantize(values.float().numpy(), gguf.GGMLQuantizationType[kind])


def _stacked(arrays: Iterator[np.ndarray]) -> np.ndarray:
    """Concatenate the arrays of all experts."""
    all_arrays = list(arrays)
    return all_arrays[0] if len(all_arrays) == 1 else np.concatenate(all_arrays)


FORMAT = GGUF()
