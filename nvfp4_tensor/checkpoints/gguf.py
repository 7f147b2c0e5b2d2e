"""GGUF, the one file that llama.cpp runs: NVFP4 as its tensor type 40.

A super-block is 64 elements of a row in 36 bytes: four block scales, the e4m3 bytes as they are, then 8 bytes a block,
byte j with element j in its low nibble and element j + 8 in the high one. (llama.cpp reads the scale halved and the
codes doubled, which is the same.) The per-tensor scale of ``blk.0.ffn_up.weight`` is the tensor ``blk.0.ffn_up.scale``.
"""

from __future__ import annotations

import contextlib
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

from nvfp4_tensor.checkpoints.common import Checkpoint, Entry, Format, LinearParts, nan_blocks
from nvfp4_tensor.checkpoints.gguf_names import (
    FREQUENCIES,
    architecture_named,
    architecture_of,
    config_of,
    frequency_factors,
    from_gguf_name,
    place,
    row_order,
    scaling_of,
    settings_of,
    to_gguf_name,
)
from nvfp4_tensor.checkpoints.gguf_tokenizer import add_tokenizer
from nvfp4_tensor.checkpoints.mxfp4 import MX_BLOCK, parts_of_mxfp4
from nvfp4_tensor.checkpoints.views import View
from nvfp4_tensor.numerics.layout import BLOCK, pack, unpack

if TYPE_CHECKING:
    import gguf

SUPER_BLOCK, _BYTES = 64, 36
_BLOCKS = SUPER_BLOCK // BLOCK
_MAGIC = b"GGUF"
_NEEDS = "GGUF needs the package gguf: pip install 'gguf>=0.19'"
_STORED = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_PLAIN = {name: dtype for dtype, name in _STORED.items()}
DENSE_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
"""What ``write(..., dense=)`` takes: the types that the package gguf rounds to."""


_DENSE_BLOCK = 32

# --- bytes -----------------------------------------------------------------------------------------------------------


def pack_blocks(codes: Tensor, scale: Tensor) -> Tensor:
    """Codes uint8 (N, K/2), the even element low, and scales e4m3 (N, K/16) to bytes (N, K/64 * 36); K % 64 == 0."""
    rows, blocks = scale.shape
    elements = unpack(codes).view(rows, blocks, BLOCK)
    nibbles = elements[..., : BLOCK // 2] | elements[..., BLOCK // 2 :] << 4
    parts = scale.view(torch.uint8).view(rows, -1, _BLOCKS), nibbles.view(rows, blocks // _BLOCKS, -1)
    return torch.cat(parts, dim=-1).view(rows, -1)


def unpack_blocks(data: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse: bytes (N, K/64 * 36) to codes uint8 (N, K/2) and scales e4m3 (N, K/16)."""
    rows = len(data)
    scale, nibbles = data.view(rows, -1, _BYTES).split([_BLOCKS, _BYTES - _BLOCKS], dim=-1)
    nibbles = nibbles.reshape(rows, -1, BLOCK // 2)
    codes = pack(torch.cat((nibbles & 0xF, nibbles >> 4), dim=-1).view(rows, -1))
    return codes, scale.reshape(rows, -1).contiguous().view(torch.float8_e4m3fn)


def unpack_mxfp4(data: Tensor) -> tuple[Tensor, Tensor]:
    """Type 39, bytes (N, K/32 * 17) to codes uint8 (N, K/2), the even element low, and e8m0 scales uint8 (N, K/32)."""
    rows = len(data)
    scale, nibbles = data.view(rows, -1, 1 + MX_BLOCK // 2).split([1, MX_BLOCK // 2], dim=-1)
    return pack(torch.cat((nibbles & 0xF, nibbles >> 4), dim=-1).reshape(rows, -1)), scale.reshape(rows, -1)


# --- reading ---------------------------------------------------------------------------------------------------------


class GGUFCheckpoint(Checkpoint):
    """A GGUF that is open: NVFP4 and MXFP4 are quantized weights, everything else is dense.

    What is stored in another of llama.cpp's types (Q4_K, ...) is decoded to bfloat16. Names, the order of q's and k's
    rows and the configuration are those of transformers.

    Attributes:
        fields: keys and values, as the package gguf reads them.
    """

    format = "gguf"

    def __init__(self, path: Path) -> None:
        self.path: Path = path
        self._last: tuple[str, Tensor] | None = None
        reader = _reader(path)
        self.fields: dict[str, gguf.ReaderField] = dict(reader.fields)
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        with _naming(path):
            self._architecture = architecture_named(self._value("general.architecture"))
            prefix = self._architecture.name + "."
            settings = {
                key.removeprefix(prefix): field.contents()
                for key, field in self.fields.items()
                if key.startswith(prefix)
            }
            if "token_embd.weight" in self._tensors:  # older files leave the number out
                settings.setdefault("vocab_size", int(self._tensors["token_embd.weight"].shape[1]))
            self.config = config_of(settings, self._architecture, "output.weight" not in self._tensors)
            self.config["_name_or_path"] = self._value("general.name", path.stem)
            if FREQUENCIES in self._tensors:
                self.config["rope_scaling"] = scaling_of(self._plain(FREQUENCIES), self.config)
            self._names = self._names_of_tensors()
            names = self._value("general.tensor_extra.name", [])
            self._a4 = dict(zip(names, self._value("general.tensor_extra.prec_a4", []), strict=True))
            self.entries = {name: self._entry(gguf_name) for name, gguf_name in self._names.items()}

    def linear(self, name: str) -> LinearParts:
        tensor = self._tensors[self._names[name]]
        rows = math.prod(tensor.shape[1:].tolist())
        data = torch.from_numpy(np.array(tensor.data)).view(rows, -1)
        order = self._order(name, rows)
        if order is not None:
            data = data[order.argsort()]
        if tensor.tensor_type.name == "MXFP4":
            with _naming(self.path, tensor.name):
                return parts_of_mxfp4(*unpack_mxfp4(data))
        codes, scale = unpack_blocks(data)
        entry = self.entries[name]
        per_tensor = self._sidecar(tensor.name, "scale")
        return LinearParts(
            qdata=codes,
            scale=scale,
            per_tensor_scale=torch.ones(()) if per_tensor is None else per_tensor,
            columns=entry.shape[-1],
            quantizes_activations=entry.quantizes_activations,
            input_scale=self._sidecar(tensor.name, "input_scale") if entry.has_input_scale else None,
        )

    def dense(self, name: str) -> Tensor:
        values = self._plain(self._names[name])
        order = self._order(name, len(values))
        return values if order is None else values[order.argsort()]

    def rows(self, name: str, first: int, last: int, buffer: Tensor | None = None) -> Tensor:
        """The tensor whose rows were asked for last is kept: decoding it takes long."""
        if self._last is None or self._last[0] != name:
            self._last = name, self.dense(name)
        return self._last[1][first:last]

    def _plain(self, gguf_name: str) -> Tensor:
        from gguf import quants

        tensor = self._tensors[gguf_name]
        kind = tensor.tensor_type.name
        shape = tuple(reversed(tensor.shape.tolist()))
        if kind == "BF16":
            return torch.from_numpy(np.array(tensor.data)).view(torch.bfloat16).view(shape)
        if kind in _PLAIN:
            return torch.from_numpy(np.array(tensor.data)).view(shape)
        return torch.from_numpy(quants.dequantize(tensor.data, tensor.tensor_type)).to(torch.bfloat16).view(shape)

    def _value(self, key: str, default: Any = None) -> Any:
        field = self.fields.get(key)
        if field is None and default is None:
            raise ValueError(f"the file has no {key}")
        return default if field is None else field.contents()

    def _names_of_tensors(self) -> dict[str, str]:
        """Names of transformers, and what the file has under them; the scales that belong to others are left out."""
        names, strange = {}, []
        for name in self._tensors:
            stem, _, kind = name.rpartition(".")
            ours = from_gguf_name(name)
            if ours is not None:
                names[ours] = name
            elif name != FREQUENCIES and not (kind in ("scale", "input_scale") and f"{stem}.weight" in self._tensors):
                strange.append(name)
        if strange:
            raise ValueError(f"tensors that no {self._architecture.model_class} has: {', '.join(strange[:5])}")
        return names

    def _entry(self, gguf_name: str) -> Entry:
        tensor = self._tensors[gguf_name]
        kind = tensor.tensor_type.name
        shape = tuple(reversed(tensor.shape.tolist()))
        if kind not in ("NVFP4", "MXFP4"):
            return Entry(shape=shape, dtype=_PLAIN.get(kind, torch.bfloat16))
        if len(shape) != 2:
            raise ValueError(f"{gguf_name} is {shape}: NVFP4 and MXFP4 are read of matrices, not of experts yet")
        # llama.cpp's converter writes an input scale of 1 where there is none.
        scale = self._sidecar(gguf_name, "input_scale")
        static = scale is not None and float(scale) != 1.0
        quantizes = bool(self._a4.get(gguf_name, static))
        return Entry(
            shape=shape,
            dtype=torch.bfloat16,
            quantized=True,
            quantizes_activations=quantizes,
            has_input_scale=quantizes and static,
        )

    def _sidecar(self, gguf_name: str, kind: str) -> Tensor | None:
        """A weight's .scale or .input_scale, float32 0-d."""
        name = f"{gguf_name.rpartition('.')[0]}.{kind}"
        if name not in self._tensors:
            return None
        values = self._plain(name)
        if values.numel() != 1 or values.dtype != torch.float32:
            raise ValueError(f"{name}: expected one float32, found {values.dtype} {tuple(values.shape)}")
        return values.reshape(())

    def _order(self, name: str, rows: int) -> Tensor | None:
        return row_order(name, rows, self.config, self._architecture)


def _reader(path: Path) -> gguf.GGUFReader:
    if importlib.util.find_spec("gguf") is None:
        raise ImportError(_NEEDS)
    import gguf

    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, KeyError, IndexError, OverflowError, UnicodeDecodeError, MemoryError) as error:
        size = path.stat().st_size
        raise ValueError(f"{path}: expected a whole GGUF file, found {size} bytes that are none: {error}") from None
    for tensor in reader.tensors:
        if tensor.data.nbytes != tensor.n_bytes:
            raise ValueError(f"{path}: tensor {tensor.name}: expected {tensor.n_bytes} bytes, the file ends before")
    return reader


@contextlib.contextmanager
def _naming(path: Path, tensor: str | None = None) -> Iterator[None]:
    """Errors get the file's name, and the tensor's."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {f'tensor {tensor}: ' if tensor else ''}{error}") from None


# --- writing ---------------------------------------------------------------------------------------------------------


class GGUF(Format):
    """llama.cpp's one file. Llama, Mistral, Qwen2 and Qwen3 are written and read; experts are not yet."""

    name = "gguf"
    is_file = True

    def detect(self, path: Path) -> bool:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC

    def read(self, path: Path) -> GGUFCheckpoint:
        if not self.detect(path):
            raise ValueError(f"{path}: expected a GGUF file, found one that does not begin with {_MAGIC.decode()}")
        return GGUFCheckpoint(path)

    def write(
        self,
        checkpoint: Checkpoint,
        path: Path,
        *,
        progress: bool = True,
        dense: str | None = None,
        tokenizer: Any = "own",
        **options: Any,
    ) -> None:
        """Write ``checkpoint`` to the file ``path``, which appears when it is whole.

        Args:
            dense: what matrices that are not quantized are stored as, one of :data:`DENSE_TYPES`; by default what
                they are. Vectors (norms, biases) are float32, as llama.cpp wants them.
            tokenizer: a tokenizer of transformers, a folder that has one, or None for a file that runs on tokens
                alone; by default the checkpoint's own, and a warning where it has none.

        Raises:
            ValueError: an architecture or a rope scaling that is not written; a weight whose columns are no multiple of
                64, that has a per-tensor scale for each row, is NaN in places, or has another name than transformers'
                models give it. Nothing is written then.
        """
        if options:
            raise ValueError(f"GGUF has no option {', '.join(options)}: it takes dense and tokenizer")
        if dense is not None and dense.upper() not in DENSE_TYPES:
            raise ValueError(f"dense is one of {', '.join(DENSE_TYPES)}, not {dense!r}")
        if importlib.util.find_spec("gguf") is None:
            raise ImportError(_NEEDS)
        path = Path(path)
        if path.exists():
            raise ValueError(f"{path} is there already: remove it first, or write to another place")
        _Writer(checkpoint, path, dense.upper() if dense else None, tokenizer).run(progress)


class _Writer:
    """One file on its way: the header of all tensors first, then their bytes, one tensor in memory at a time."""

    def __init__(self, checkpoint: Checkpoint, path: Path, dense: str | None, tokenizer: Any) -> None:
        self.checkpoint, self.path, self.dense = checkpoint, path, dense
        self.architecture = architecture_of(checkpoint.config)
        self.settings = settings_of(checkpoint.config, self.architecture)
        self.names = self._names()
        for name in self.names:
            self._check(name, checkpoint.entries[name])
        self.tokenizer = self._own_tokenizer() if isinstance(tokenizer, str) and tokenizer == "own" else tokenizer

    def run(self, progress: bool) -> None:
        import gguf

        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(self.path.name + ".tmp")
        writer = gguf.GGUFWriter(temporary, self.architecture.name)
        try:
            self._add_settings(writer)
            add_tokenizer(writer, self.tokenizer, self.settings_int("vocab_size"))
            plan = list(self._plan(writer))
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            total = sum(size for _, size in plan)
            bar = tqdm(total=total, desc=f"writing {self.path.name}", unit="B", unit_scale=True, disable=not progress)
            with bar:
                for name, size in plan:
                    for data in self._data(name):
                        writer.write_tensor_data(data)
                    bar.update(size)
            writer.close()
            temporary.replace(self.path)
        finally:
            writer.close()
            temporary.unlink(missing_ok=True)

    def settings_int(self, key: str) -> int:
        """A setting that is a whole number."""
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
                f"{self.path.name} gets no tokenizer, for {path or 'a model in memory'} has none: llama.cpp will run "
                "it on tokens, not on text. tokenizer= takes one; None says that none is wanted",
                stacklevel=5,
            )
            return None
        return path

    def _names(self) -> dict[str, str]:
        names = {}
        for name, entry in self.checkpoint.entries.items():
            gguf_name = to_gguf_name(name)
            if gguf_name is None:
                raise ValueError(f"{name} has no name in llama.cpp's {self.architecture.name}: leave it out, or dense")
            if name == "lm_head.weight" and self.checkpoint.config.get("tie_word_embeddings") and not entry.quantized:
                continue  # llama.cpp takes the embedding for it
            names[name] = gguf_name
        return dict(sorted(names.items(), key=lambda item: place(item[1])))

    def _check(self, name: str, entry: Entry) -> None:
        if not entry.quantized:
            if entry.dtype not in _STORED:
                raise ValueError(f"{name} is {entry.dtype}, and GGUF takes float32, float16 and bfloat16")
            kind = self._dense_type(entry)
            if kind not in _PLAIN and entry.shape[-1] % _DENSE_BLOCK:
                raise ValueError(f"{name} has {entry.shape[-1]} columns, and {kind} needs a multiple of {_DENSE_BLOCK}")
            return
        if len(entry.shape) != 2:
            raise ValueError(f"{name} is {entry.shape}: experts are not written to GGUF yet")
        if entry.shape[-1] % SUPER_BLOCK:
            raise ValueError(
                f"{name} has {entry.shape[-1]} columns, and NVFP4 in GGUF needs a multiple of {SUPER_BLOCK}: leave it "
                "dense (exclude it)"
            )
        if entry.scales not in ((), (1,)):
            raise ValueError(f"{name} has per-tensor scales {entry.scales}, and GGUF one: split what was joined")
        if ".mlp." in name:
            self._check_ffn(name)

    def _check_ffn(self, name: str) -> None:
        """Raises a ValueError for what llama.cpp reads and computes wrongly, or aborts at."""
        bias = name.removesuffix("weight") + "bias"
        if bias in self.checkpoint.entries:
            raise ValueError(f"llama.cpp runs no NVFP4 feed-forward weights with a bias, as {name} has: leave it dense")
        if not self.architecture.scales_ffn and float(self.checkpoint.per_tensor_scale(name)) != 1:
            raise ValueError(
                f"llama.cpp leaves out the per-tensor scales of {self.architecture.name}'s feed-forward weights, and "
                f"{name} has one: quantize with amax=2688 (a scale of 1), or leave it dense (exclude='*.mlp.*')"
            )

    def _add_settings(self, writer: gguf.GGUFWriter) -> None:
        import gguf

        config = self.checkpoint.config
        writer.add_type("model")
        writer.add_name(str(config.get("_name_or_path") or self.path.stem))
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        quantized = [name for name in self.names if self.checkpoint.entries[name].quantized]
        writer.add_file_type(self._file_type(bool(quantized)))
        for key, value in self.settings.items():
            key = f"{self.architecture.name}.{key}"
            if isinstance(value, float):
                writer.add_float32(key, value)
            else:
                writer.add_uint32(key, value)
        if quantized:  # which weights meet 4-bit activations, on hardware that has them
            values = [self.checkpoint.entries[name].quantizes_activations for name in quantized]
            writer.add_array("general.tensor_extra.name", [self.names[name] for name in quantized])
            writer.add_array("general.tensor_extra.prec_a4", values)

    def _file_type(self, quantized: bool) -> gguf.LlamaFileType:
        import gguf

        matrices = (entry for entry in self.checkpoint.entries.values() if len(entry.shape) > 1)
        kind = "NVFP4" if quantized else next(map(self._dense_type, matrices), "F32")
        return gguf.LlamaFileType.ALL_F32 if kind == "F32" else gguf.LlamaFileType[f"MOSTLY_{kind}"]

    def _plan(self, writer: gguf.GGUFWriter) -> Iterator[tuple[str, int]]:
        """Announce every tensor; (name, bytes) of the parameters, in the order in which they are written."""
        import gguf

        float32, types = np.dtype(np.float32), gguf.GGMLQuantizationType
        factors = frequency_factors(self.checkpoint.config, self.settings_int("rope.dimension_count"))
        if factors is not None:
            writer.add_tensor_info(FREQUENCIES, factors.shape, float32, 4 * factors.numel(), types.F32)
            yield FREQUENCIES, 4 * factors.numel()
        for name, gguf_name in self.names.items():
            entry = self.checkpoint.entries[name]
            kind = types.NVFP4 if entry.quantized else types[self._dense_type(entry)]
            block, size = gguf.GGML_QUANT_SIZES[kind]
            nbytes = math.prod(entry.shape) // block * size
            writer.add_tensor_info(gguf_name, entry.shape, float32, nbytes, kind)
            for sidecar in self._sidecars(entry):
                writer.add_tensor_info(f"{gguf_name.rpartition('.')[0]}.{sidecar}", (1,), float32, 4, types.F32)
            yield name, nbytes

    def _dense_type(self, entry: Entry) -> str:
        if len(entry.shape) < 2:
            return "F32"
        return self.dense or _STORED[entry.dtype]

    @staticmethod
    def _sidecars(entry: Entry) -> list[str]:
        if not entry.quantized:
            return []
        return ["scale", "input_scale"] if entry.has_input_scale else ["scale"]

    def _data(self, name: str) -> Iterator[np.ndarray]:
        """A parameter's bytes, then its scales."""
        if name == FREQUENCIES:
            factors = frequency_factors(self.checkpoint.config, self.settings_int("rope.dimension_count"))
            assert factors is not None
            yield factors.numpy()
            return
        entry = self.checkpoint.entries[name]
        order = row_order(name, entry.shape[0], self.checkpoint.config, self.architecture)
        if not entry.quantized:
            yield self._rounded(name, entry, order)
            return
        parts = self.checkpoint.linear(name)
        if nan_blocks(parts):
            raise ValueError(f"{name} has {nan_blocks(parts)} NaN blocks, which llama.cpp would read as zeros")
        data = pack_blocks(parts.qdata, parts.scale)
        yield (data if order is None else data[order]).numpy()
        for sidecar in self._sidecars(entry):
            value = parts.per_tensor_scale if sidecar == "scale" else parts.input_scale
            assert value is not None
            yield value.reshape(1).float().numpy()

    def _rounded(self, name: str, entry: Entry, order: Tensor | None) -> np.ndarray:
        import gguf

        values = self.checkpoint.dense(name)
        values = values if order is None else values[order]
        kind = self._dense_type(entry)
        if kind in _PLAIN:
            values = values.to(_PLAIN[kind]).contiguous()
            return (values.view(torch.int16) if kind == "BF16" else values).numpy()
        return gguf.quants.quantize(values.float().numpy(), gguf.GGMLQuantizationType[kind])


FORMAT = GGUF()
