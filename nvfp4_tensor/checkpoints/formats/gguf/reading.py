"""Read GGUF files with any of llama.cpp's tensor types."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nvfp4_tensor._compat.frames import warn_user
from nvfp4_tensor.checkpoints.checkpoint import Checkpoint, Entry, chunks_of
from nvfp4_tensor.checkpoints.formats.gguf.blocks import unpack_blocks, unpack_mxfp4
from nvfp4_tensor.checkpoints.formats.gguf.families import LONG, SHORT, longrope_of
from nvfp4_tensor.checkpoints.formats.gguf.names import (
    FREQUENCIES,
    SCALING,
    TensorNames,
    architecture_named,
    config_of,
    row_order,
    scaling_of,
)
from nvfp4_tensor.checkpoints.formats.gguf.tokenizer import tokenizer_of
from nvfp4_tensor.checkpoints.formats.mxfp4.values import parts_of_mxfp4
from nvfp4_tensor.checkpoints.io.files import Files, naming
from nvfp4_tensor.checkpoints.io.sidecar import read_factors, sidecars_of, with_factors
from nvfp4_tensor.checkpoints.names import warn_of_missing_input_scales
from nvfp4_tensor.checkpoints.parts import LinearParts, check_scales

if TYPE_CHECKING:
    import gguf

NEEDS = "GGUF needs the package gguf: pip install 'gguf>=0.19'"
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The types without blocks."""
VECTORS = {torch.bfloat16: "nvfp4_tensor.vectors_bf16", torch.float16: "nvfp4_tensor.vectors_f16"}
"""Keys of this package with the names of vectors that were converted to float32 for llama.cpp."""
_SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding"}
"""Special tokens by transformers' and llama.cpp's names. Without the end token, generation would not stop."""
WRITTEN = "nvfp4_tensor.version"
"""A key that marks files that this package wrote."""


class GGUFCheckpoint(Checkpoint):
    """An open GGUF file. NVFP4 and MXFP4 tensors are quantized weights, all others are dense.

    Tensors of llama.cpp's other types (Q4_K, ...) are decoded to bfloat16. Names, the order of rows of q and k, and the
    configuration are those of transformers.

    Attributes:
        fields: the keys and values of the file, from the package gguf.
    """

    format = "gguf"

    def __init__(self, path: Path) -> None:
        self.path: Path = path
        self.files: Files = Files(path, sidecars_of(path))
        self._last: tuple[str, Tensor] | None = None
        reader = _opened(path)
        self.fields: dict[str, gguf.ReaderField] = dict(reader.fields)
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        with naming(path):
            self._vectors = {name: dtype for dtype, key in VECTORS.items() for name in self._value(key, [])}
            name = self._value("general.architecture")
            self._experts = int(self._value(f"{name}.expert_count", 0))
            self._architecture = architecture_named(name, self._experts > 0)
            self._names = TensorNames(self._architecture)
            prefix = name + "."
            settings = {
                key.removeprefix(prefix): field.contents()
                for key, field in self.fields.items()
                if key.startswith(prefix)
            }
            if "token_embd.weight" in self._tensors:  # older files do not have the number
                settings.setdefault("vocab_size", int(self._tensors["token_embd.weight"].shape[1]))
            self.config = config_of(settings, self._architecture, "output.weight" not in self._tensors)
            self.config["_name_or_path"] = self._value("general.name", path.stem)
            for module, key in (("attn_output", "attention_bias"), ("ffn_up", "mlp_bias")):
                if f"blk.0.{module}.bias" in self._tensors and not self._architecture.settings:
                    self.config[key] = True  # llama.cpp takes biases that are there
            for name, key in _SPECIAL.items():
                if f"tokenizer.ggml.{key}_token_id" in self.fields:
                    self.config[f"{name}_token_id"] = int(self._value(f"tokenizer.ggml.{key}_token_id"))
            if FREQUENCIES in self._tensors:
                written = self._value(SCALING) if SCALING in self.fields else None
                self.config["rope_scaling"] = scaling_of(self._plain(FREQUENCIES), self.config, written)
            if LONG in self._tensors and SHORT in self._tensors:
                self.config |= longrope_of({each: self._plain(each) for each in (LONG, SHORT)}, settings)
            self._locations = self._find_tensors()
            names = self._value("general.tensor_extra.name", [])
            self._a4 = dict(zip(names, self._value("general.tensor_extra.prec_a4", []), strict=True))
            self._factors = read_factors(path)
            self.entries = {name: self._entry(*location) for name, location in self._locations.items()}
            warn_of_missing_input_scales(path, self.entries)
            for name in self._names.in_model("token_embd.weight"):
                if name in self.entries:
                    self.config["dtype"] = str(self.entries[name].dtype).removeprefix("torch.")
            for name, entry in self.entries.items():
                self._order(name, math.prod(entry.shape[:1]))  # check the rows of q and k

    def value(self, name: str) -> LinearParts | Tensor:
        gguf_name, expert = self._locations[name]
        tensor, entry = self._tensors[gguf_name], self.entries[name]
        rows = math.prod(entry.shape[:-1])
        if not entry.quantized:
            values = self._plain(gguf_name, expert)
            order = self._order(name, len(values))
            return values if order is None else values[order.argsort()]
        data = torch.from_numpy(self._data(tensor, expert)).view(rows, -1)
        order = self._order(name, rows)
        if order is not None:
            data = data[order.argsort()]
        if tensor.tensor_type.name == "MXFP4":
            with naming(self.path, gguf_name):
                return parts_of_mxfp4(*unpack_mxfp4(data))
        codes, scale = unpack_blocks(data)
        parts = LinearParts(
            qdata=codes,
            scale=scale,
            per_tensor_scale=self._factor(gguf_name, expert),
            columns=entry.shape[-1],
            quantizes_activations=entry.quantizes_activations,
            input_scale=self._sidecar(gguf_name, "input_scale", expert) if entry.has_input_scale else None,
        )
        with naming(self.path, gguf_name):
            return with_factors(check_scales(parts), self._factors.get(name, {}))

    def write_auxiliary_files(self, folder: Path) -> None:
        """Write the tokenizer as transformers files, or warn if it cannot be read."""
        try:
            tokenizer = tokenizer_of(self.path, self.fields)
        except (ImportError, ValueError, OSError, KeyError) as error:
            warn_user(
                f"the tokenizer of {self.path.name} is omitted, because it cannot be read ({error}): copy the model's "
                "tokenizer.json and tokenizer_config.json to the output",
            )
            return
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)

    def per_tensor_scale(self, name: str) -> Tensor:
        gguf_name, expert = self._locations[name]
        if self._tensors[gguf_name].tensor_type.name == "MXFP4":
            return self.linear(name).per_tensor_scale
        return self._factor(gguf_name, expert)

    def chunks(self, name: str, rows: int = 0, buffer: Tensor | None = None) -> Iterator[Tensor]:
        """Read chunks of a dense tensor. The last tensor is kept, because decoding it is slow."""
        if self._last is None or self._last[0] != name:
            self._last = name, self.dense(name)
        return chunks_of(self._last[1], rows)

    def _plain(self, gguf_name: str, expert: int | None = None) -> Tensor:
        from gguf import quants

        tensor = self._tensors[gguf_name]
        kind, data = tensor.tensor_type.name, self._data(tensor, expert)
        shape = _shape(tensor, expert)
        if kind == "BF16":
            return torch.from_numpy(data).view(torch.bfloat16).view(shape)
        if kind in PLAIN:
            values = torch.from_numpy(data).view(shape)
            if self._architecture.norm_offset and gguf_name.endswith("norm.weight"):
                values = values - self._architecture.norm_offset
            return values.to(self._vectors.get(gguf_name, values.dtype))
        return torch.from_numpy(quants.dequantize(data, tensor.tensor_type)).to(torch.bfloat16).view(shape)

    def _data(self, tensor: gguf.ReaderTensor, expert: int | None) -> np.ndarray:
        """Read the data of a tensor, or of one expert. A memory map would crash if the file were truncated."""
        like = tensor.data if expert is None else tensor.data[expert]
        start = tensor.data_offset + (expert or 0) * like.nbytes
        data = np.fromfile(self.path, like.dtype, like.size, offset=start)
        if data.size != like.size:
            raise ValueError(f"{self.path} was truncated while it was read")
        return data.reshape(like.shape)

    def _value(self, key: str, default: Any = None) -> Any:
        field = self.fields.get(key)
        if field is None and default is None:
            raise ValueError(f"the file has no {key}")
        return default if field is None else field.contents()

    def _find_tensors(self) -> dict[str, tuple[str, int | None]]:
        """Return the tensor of each transformers name, and the index of the expert in it; without scales of weights."""
        locations: dict[str, tuple[str, int | None]] = {}
        unknown = []
        for name, tensor in self._tensors.items():
            stem, _, kind = name.rpartition(".")
            names = self._names.in_model(name, self._experts)
            stacked = len(tensor.shape) == 3 or (len(tensor.shape) == 2 and name.endswith("_exps.bias"))
            if stacked and names and len(names) != tensor.shape[-1]:
                raise ValueError(f"{name} has {tensor.shape[-1]} experts, expected {self._experts}")
            if names:
                locations.update((each, (name, i if stacked else None)) for i, each in enumerate(names))
            elif name not in (FREQUENCIES, LONG, SHORT) and not (
                kind in ("scale", "input_scale") and f"{stem}.weight" in self._tensors
            ):
                unknown.append(name)
        if unknown:
            raise ValueError(f"{self._architecture.model_class} does not have the tensors {', '.join(unknown[:5])}")
        return locations

    def _entry(self, gguf_name: str, expert: int | None) -> Entry:
        tensor = self._tensors[gguf_name]
        kind, shape = tensor.tensor_type.name, _shape(tensor, expert)
        if kind not in ("NVFP4", "MXFP4"):
            return Entry(shape=shape, dtype=self._vectors.get(gguf_name, PLAIN.get(kind, torch.bfloat16)))
        if len(shape) != 2:
            raise ValueError(f"{gguf_name} has shape {shape}: NVFP4 and MXFP4 are supported for matrices and experts")
        # llama.cpp's converter writes an input scale of 1 if there is none.
        scale = self._sidecar(gguf_name, "input_scale", expert)
        static = scale is not None and (float(scale) != 1.0 or WRITTEN in self.fields)
        quantizes = bool(self._a4.get(gguf_name, static))
        return Entry(
            shape=shape,
            dtype=torch.bfloat16,
            quantized=True,
            quantizes_activations=quantizes,
            has_input_scale=quantizes and static,
        )

    def _factor(self, gguf_name: str, expert: int | None) -> Tensor:
        """Return the per-tensor scale of a weight; 1 if the file has none and another program wrote it."""
        scale = self._sidecar(gguf_name, "scale", expert)
        if scale is None and WRITTEN in self.fields:
            raise ValueError(f"{self.path}: tensor {gguf_name}: its scale is missing")
        return torch.ones((), dtype=torch.float32) if scale is None else scale

    def _sidecar(self, gguf_name: str, kind: str, expert: int | None) -> Tensor | None:
        """Return the .scale or .input_scale of a weight or of one expert, float32 0-d, or None."""
        name = f"{gguf_name.rpartition('.')[0]}.{kind}"
        if name not in self._tensors:
            return None
        values, count = self._plain(name), 1 if expert is None else self._experts
        if values.numel() != count or values.dtype != torch.float32:
            raise ValueError(f"{name}: expected {count} of float32, found {values.dtype} {tuple(values.shape)}")
        return values.reshape(-1)[expert or 0]

    def _order(self, name: str, rows: int) -> Tensor | None:
        return row_order(name, rows, self.config, self._architecture)


def _opened(path: Path) -> gguf.GGUFReader:
    if importlib.util.find_spec("gguf") is None:
        raise ImportError(NEEDS)
    import gguf

    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, KeyError, IndexError, OverflowError, UnicodeDecodeError, MemoryError) as error:
        size = path.stat().st_size
        raise ValueError(f"{path} is not a complete GGUF file ({size} bytes): {error}") from None
    _check_layout(path, reader)
    return reader


def _check_layout(path: Path, reader: gguf.GGUFReader) -> None:
    """Raise a ValueError unless tensors are complete, aligned, and do not overlap."""
    end, before = 0, ""
    for tensor in sorted(reader.tensors, key=lambda each: each.data_offset):
        where = f"{path}: tensor {tensor.name}"
        if 0 in tensor.shape:
            raise ValueError(f"{where}: expected rows and columns, found a shape of {tensor.shape.tolist()[::-1]}")
        if tensor.data.nbytes != tensor.n_bytes:
            raise ValueError(f"{where}: expected {tensor.n_bytes} bytes, but the file is shorter")
        if tensor.data_offset % reader.alignment:
            raise ValueError(
                f"{where}: expected an offset in multiples of {reader.alignment}, found {tensor.data_offset}"
            )
        if tensor.data_offset < end:
            raise ValueError(f"{where}: its bytes overlap with those of {before}")
        end, before = tensor.data_offset + tensor.n_bytes, tensor.name


def _shape(tensor: gguf.ReaderTensor, expert: int | None) -> tuple[int, ...]:
    """Return the shape in torch's order, of one expert if given."""
    shape = tuple(reversed(tensor.shape.tolist()))
    return shape if expert is None else shape[1:]
