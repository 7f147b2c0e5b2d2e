"""Read the safetensors files of a folder as one mapping, and write a file in any order, in chunks of tensors.

The safetensors library checks each file. The bytes are read here by their offsets, because ``get_slice`` maps the file,
so that the process dies of SIGBUS if the file is truncated meanwhile; with ``backend="pread"`` (0.8.0) it reads at a
fifteenth of the speed. They are written by their offsets, because the library writes only entire tensors.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nvfp4_tensor.checkpoints.io.files import check_regular, check_same
from nvfp4_tensor.checkpoints.io.strips import in_parallel

DTYPES = {
    "U64": torch.uint64, "I64": torch.int64, "F64": torch.float64, "F32": torch.float32, "U32": torch.uint32,
    "I32": torch.int32, "BF16": torch.bfloat16, "F16": torch.float16, "U16": torch.uint16, "I16": torch.int16,
    "F8_E8M0": torch.float8_e8m0fnu, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""By their names in headers, in the order in which the safetensors library writes them."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}

CHUNK = 32 << 20
"""Bytes of a tensor that are read, quantized or copied at a time."""


_PIECE = 4 << 20
"""Bytes that a thread reads at a time."""

Plan: TypeAlias = "dict[str, dict[str, dict[str, Tensor]]]"
"""The tensors of each parameter of each file, on the meta device."""


class TensorInfo(NamedTuple):
    """The dtype and shape of a tensor, its file, and the offset of its first byte."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{NAMES[self.dtype]} {list(self.shape)}"


class Shards(Mapping[str, Tensor]):
    """The tensors of a folder of safetensors files, or of one file, by name. Each is read on access.

    Attributes:
        path: the folder or file.
        files: the files, in order.
        info: by tensor name, in the order of the files and of the bytes in them.
        metadata: the metadata of all headers.
    """

    def __init__(self, path: Path) -> None:
        """
        Raises:
            ValueError: there are no safetensors files, a file is invalid or truncated, the index names a missing file
                or tensor, or a name is in two files.
        """
        self.path = path
        self.info: dict[str, TensorInfo] = {}
        self.metadata: dict[str, str] = {}
        self._open: dict[Path, BinaryIO] = {}
        self._stats: dict[Path, os.stat_result] = {}
        self.files, index = _files(path)
        for file in self.files:
            check_regular(file)
            self._stats[file] = file.stat()
            for name, info in _header(file, self.metadata).items():
                if name in self.info:
                    raise ValueError(f"{path}: tensor {name} is in {self.info[name].file.name} and in {file.name}")
                self.info[name] = info
        for name, where in index.items():
            if name not in self.info or self.info[name].file.name != where:
                raise ValueError(f"{path}: the index says that tensor {name} is in {where}, but it is not")

    def __getitem__(self, name: str) -> Tensor:
        info = self.info[name]
        data = torch.empty(info.nbytes, dtype=torch.uint8, device="cpu")
        self._fill(data, info, 0)
        return data.view(info.dtype).view(info.shape) if info.shape else data.view(info.dtype)[0]

    def chunks(self, name: str, rows: int = 0, buffer: Tensor | None = None) -> Iterator[Tensor]:
        """Yield chunks of a tensor in order, (rows, columns), with its leading dimensions flattened.

        Each chunk overwrites the one before it, because reading into memory that was used before takes half the time.

        Args:
            rows: the rows of a chunk; by default those of :data:`CHUNK` bytes.
            buffer: uint8 memory for the chunks.
        """
        info = self.info[name]
        columns = info.shape[-1] if info.shape else 1
        row = columns * info.dtype.itemsize
        step = min(rows or max(CHUNK // max(row, 1), 1), info.nbytes // max(row, 1)) * row
        if buffer is None:
            buffer = torch.empty(step, dtype=torch.uint8, device="cpu")
        for start in range(0, info.nbytes, max(step, 1)):
            chunk = buffer[: min(step, info.nbytes - start)]
            self._fill(chunk, info, start)
            yield chunk.view(info.dtype).view(-1, columns)

    def _fill(self, data: Tensor, info: TensorInfo, start: int) -> None:
        """Fill ``data`` with bytes of the tensor, from byte ``start`` on."""
        file = self._open.get(info.file)
        if file is None:
            file = self._open[info.file] = info.file.open("rb", buffering=0)
            check_same(info.file, self._stats[info.file], os.fstat(file.fileno()))
        pieces = data.split(_PIECE)
        offsets = range(info.offset + start, info.offset + start + len(data), _PIECE)
        in_parallel(functools.partial(_fill, file), pieces, offsets)

    def __contains__(self, name: object) -> bool:  # Mapping's own reads the tensor
        return name in self.info

    def __iter__(self) -> Iterator[str]:
        return iter(self.info)

    def __len__(self) -> int:
        return len(self.info)

    def close(self) -> None:
        """Close the files. The next read opens its file again."""
        while self._open:
            self._open.popitem()[1].close()

    def __del__(self) -> None:
        self.close()


def _fill(file: BinaryIO, data: Tensor, offset: int) -> None:
    """Fill ``data`` with bytes of a file from an offset on."""
    view = data.numpy().data
    while view:
        count = os.preadv(file.fileno(), [view], offset)
        if not count:
            raise ValueError(f"{file.name} was truncated while it was read")
        view, offset = view[count:], offset + count


def _files(path: Path) -> tuple[list[Path], dict[str, str]]:
    """Return the files of a checkpoint, and the weight map of its index (file by tensor), {} if there is none."""
    if path.is_file():
        return [path], {}
    indices = sorted(path.glob("*.safetensors.index.json"))
    usual = path / "model.safetensors.index.json"
    if usual in indices:  # consolidated.safetensors.index.json has the same model under other names
        indices = [usual]
    if len(indices) > 1:
        raise ValueError(f"{path} has {len(indices)} indices, expected one: {', '.join(each.name for each in indices)}")
    if not indices:
        single = path / "model.safetensors"
        files = [single] if single.exists() else sorted(path.glob("*.safetensors"))
        if not files:
            raise ValueError(f"{path}: expected safetensors files, found {what_is_in(path)}")
        return files, {}
    index = read_json(indices[0]).get("weight_map")
    if not isinstance(index, dict) or not index or not all(isinstance(file, str) for file in index.values()):
        raise ValueError(f"{indices[0]}: expected a weight_map from tensor to file, found {str(index)[:80]}")
    names = sorted(set(index.values()))
    single = path / "model.safetensors"
    if indices[0] == usual and single.exists() and single.name not in names:  # saved twice, with another max_shard_size
        raise ValueError(
            f"{path} has {single.name}, which transformers loads, and {usual.name}, which names other files: remove "
            "the model that is not meant"
        )
    if absent := set(names) - {each.name for each in path.iterdir() if each.is_file()}:
        raise ValueError(f"{indices[0]} names {min(absent)[:200]}, which is not in {path}")
    return [path / name for name in names], index


def what_is_in(path: Path) -> str:
    """Describe a path for a message: the first files of a folder, or the size of a file."""
    if not path.is_dir():
        return f"a file of {path.stat().st_size} bytes"
    names = sorted(each.name for each in path.iterdir())
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".pkl", ".ckpt"))]
    if pickles:
        return f"{', '.join(pickles[:3])}: pickles, which are not read because they can run code"
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "") if names else "an empty folder"


def _header(file: Path, metadata: dict[str, str]) -> dict[str, TensorInfo]:
    """Return the tensors of a file in the order of their bytes, and add its metadata to ``metadata``."""
    try:
        with safe_open(file, "pt") as checked:  # lengths, offsets and overlaps
            metadata.update(checked.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is not a complete safetensors file ({file.stat().st_size} bytes): {error}") from None
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    infos = {}
    for name, fields in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        if fields["dtype"] not in DTYPES:
            raise ValueError(f"{file}: tensor {name}: expected a dtype of torch, found {fields['dtype']}")
        dtype = DTYPES[fields["dtype"]]
        infos[name] = TensorInfo(dtype, tuple(fields["shape"]), file, 8 + length + fields["data_offsets"][0])
    return infos


class ShardFile:
    """A safetensors file that is written tensor by tensor, in any order, after its layout is fixed.

    It is written as ``<name>.tmp``, and renamed by :meth:`finish`. It is a context manager that closes the file.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """tensors: tensors with the final dtypes and shapes, possibly on the meta device; values are not read."""
        # The order of the safetensors library: every tensor is aligned, and the file equals the one that it writes.
        order = {dtype: rank for rank, dtype in enumerate(DTYPES.values())}
        names = sorted(tensors, key=lambda name: (order[tensors[name].dtype], name))
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        self._places: dict[str, tuple[int, int]] = {}  # of the bytes that are missing
        end = 0
        for name in names:
            tensor = tensors[name]
            self._places[name] = start, end = end, end + tensor.nbytes
            header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.path, self.nbytes = path, 8 + len(text) + end
        self._start = 8 + len(text)
        self._written = path.with_name(path.name + ".tmp")
        self._file = self._written.open("wb", buffering=0)
        self._writer = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None
        self._write_at(0, memoryview(len(text).to_bytes(8, "little") + text))

    def write(self, name: str, chunk: Tensor) -> None:
        """Write a tensor, or its next chunk."""
        self._wait()
        self._write_all({name: chunk})

    def write_later(self, tensors: Mapping[str, Tensor]) -> None:
        """Write entire tensors in another thread. They must not change until the next call."""
        self._wait()
        self._pending = self._writer.submit(self._write_all, tensors)

    def _write_all(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            data = tensor.contiguous().view(-1).view(torch.uint8)
            start, end = self._places[name]
            assert start + len(data) <= end, name
            self._write_at(self._start + start, data.numpy().data)
            self._places[name] = start + len(data), end

    def _write_at(self, offset: int, data: memoryview) -> None:
        self._file.seek(offset)
        while data:
            data = data[self._file.write(data) :]

    def _wait(self) -> None:
        """Wait for the other thread, and raise its exception if there is one."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def finish(self) -> None:
        """Rename the file to its final name. All tensors must have been written."""
        self._wait()
        missing = [name for name, (start, end) in self._places.items() if start < end]
        assert not missing, missing
        self.close()
        self._written.replace(self.path)

    def close(self) -> None:
        """Close the file. Unless it is finished, it keeps its temporary name."""
        self._writer.shutdown()
        self._file.close()

    def __enter__(self) -> ShardFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def by_size(tensors_of: Mapping[str, dict[str, Tensor]], shard_bytes: int, stem: str = "model") -> Plan:
    """Fill files up to ``shard_bytes``, in the order of the entries. ``stem``: what their names begin with."""
    shards: list[dict[str, dict[str, Tensor]]] = [{}]
    size = 0
    for name, tensors in tensors_of.items():
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        if shards[-1] and size + nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensors
        size += nbytes
    if len(shards) == 1:
        return {f"{stem}.safetensors": shards[0]}
    return {f"{stem}-{i:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards, 1)}


def stem_of(config: Mapping[str, Any]) -> str:
    """Return what the names of a model's files begin with, by which diffusers or transformers find them."""
    return "diffusion_pytorch_model" if "_class_name" in config else "model"


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        ValueError: the file is not a JSON object; the message has its name.
    """
    check_regular(file)
    try:
        value = parse_json(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: expected JSON, found {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file}: expected a JSON object, found {type(value).__name__}")
    return value


def parse_json(text: str | bytes) -> Any:
    """Parse JSON.

    Raises:
        ValueError: the text is not JSON, or is nested deeper than Python's recursion allows.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    """Write indented JSON. The file appears, or replaces an older one, when it is complete."""
    written = file.with_suffix(".tmp")
    try:
        written.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        written.replace(file)
    finally:
        written.unlink(missing_ok=True)
