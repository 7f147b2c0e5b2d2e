"""Open what ``checkpoints.quantize`` reads: dense weights, and those of other quantizations, which are decoded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nvfp4_tensor.checkpoints.checkpoint import Checkpoint, Entry, detect, read
from nvfp4_tensor.checkpoints.formats.dense import Dense
from nvfp4_tensor.checkpoints.formats.gguf.format import FORMAT as GGUF
from nvfp4_tensor.checkpoints.formats.modelopt import HF_QUANT_CONFIG
from nvfp4_tensor.checkpoints.formats.table import entries_of
from nvfp4_tensor.checkpoints.io.folder import FolderCheckpoint
from nvfp4_tensor.checkpoints.io.safetensors import read_json
from nvfp4_tensor.checkpoints.sources import layouts, libraries
from nvfp4_tensor.checkpoints.sources.coded import CodedFolder
from nvfp4_tensor.quantization.names import some

METHODS: Mapping[str, tuple[Callable[[CodedFolder, layouts.Settings], layouts.Found], ...]] = {
    "": (layouts.bitsandbytes, libraries.torchao, layouts.fp8),
    "fp8": (layouts.fp8,),
    "fbgemm_fp8": (layouts.fp8,),
    "modelopt": (layouts.fp8,),
    "gptq": (layouts.gptq,),
    "awq": (layouts.awq,),
    "bitsandbytes": (layouts.bitsandbytes,),
    "torchao": (libraries.torchao,),
    "compressed-tensors": (libraries.compressed_tensors, layouts.fp8),
}
"""What finds the weights of each quant_method, "" for a folder whose config.json has none."""

_INSTEAD = dict.fromkeys(("mxfp4", "auto-round"), "use checkpoints.convert, which rounds nothing")
_NVFP4 = ("weight_scale_2", "weight_global_scale", "_weight_per_tensor_scale")
"""Ends of the names of per-tensor scales, in ModelOpt's, compressed-tensors' and torchao's format."""

OTHER_CONFIGS = (HF_QUANT_CONFIG, "quantize_config.json", "quant_config.json")
"""Files in which ModelOpt, and earlier releases of GPTQ's and AWQ's libraries, write what is now in config.json."""


def open_source(path: Path) -> Checkpoint:
    """Open a checkpoint as one of dense weights.

    Raises:
        ValueError: it is invalid, or has weights that are not read, by name.
    """
    return GGUF.read(path) if GGUF.detect(path) else SOURCE.read(path)


def open_any(path: Path) -> Checkpoint:
    """Open a checkpoint, or what only ``quantize`` reads."""
    if detect(path) == "dense":
        return open_source(path)
    try:
        return read(path)
    except ValueError:
        with contextlib.suppress(ValueError):  # FP8 of ModelOpt, integers of compressed-tensors or torchao
            return open_source(path)
        raise


class Source(Dense):
    """A folder of safetensors with weights that are dense, or in the codes of another quantization."""

    def quantization(self, folder: Path, config: dict[str, Any]) -> dict[str, Any]:
        inner = [value for value in config.values() if isinstance(value, dict)]  # such as text_config
        found = [each.pop("quantization_config", None) for each in (config, *inner)]
        found += [config.pop("compression_config", None)]  # of earlier releases of compressed-tensors
        found += [read_json(folder / name) for name in OTHER_CONFIGS if (folder / name).is_file()]
        settings: Any = next((each for each in found if each is not None), {})
        return settings if isinstance(settings, dict) else {"quant_method": settings}

    def entries(self, checkpoint: FolderCheckpoint) -> dict[str, Entry]:
        assert isinstance(checkpoint, CodedFolder)
        settings, info = checkpoint.quantization, checkpoint.shards.info
        method = _method(settings)
        if nvfp4 := [key for key in info if key.endswith(_NVFP4)]:
            raise ValueError(
                f"{checkpoint.path}: expected a dense model, found NVFP4 ({some(nvfp4)}): use checkpoints.convert "
                "for a quantized model"
            )
        if method not in METHODS:
            raise ValueError(
                f"{checkpoint.path}: expected a model that is dense or quantized by {', '.join(list(METHODS)[1:])}, "
                f"found one quantized by {method}: {_INSTEAD.get(method, 'decode it to bfloat16 first')}"
            )
        for find in METHODS[method]:
            checkpoint.coded_weights |= dict(find(checkpoint, settings))
        coded = checkpoint.coded_weights
        taken = {key for each in coded.values() for key in (*each.parts.values(), *each.unused)}
        entries = {name: entry for name, entry in entries_of(checkpoint.shards).items() if name not in taken}
        for name, each in coded.items():
            shard = info[next(iter(each.parts.values()))].file.name
            entries[name] = Entry(shape=each.shape, dtype=checkpoint.dtype(), shard=shard)
        if coded:
            checkpoint.format = method or some(sorted({each.kind for each in coded.values()}))
        return entries

    def read(self, path: Path) -> CodedFolder:
        return CodedFolder(self, Path(path))


SOURCE = Source()


def _method(settings: Mapping[str, Any]) -> str:
    """Return the quant_method of a configuration. Some files have only what identifies it."""
    method = settings.get("quant_method")
    if method is None and settings:
        method = "modelopt" if "producer" in settings else "awq" if "w_bit" in settings else "gptq"
    return str(method or "").replace("compressed_tensors", "compressed-tensors")
