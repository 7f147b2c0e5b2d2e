"""The tables by which safetensors formats store quantized weights, and the reader and writer of all of them.

A format is a :class:`TableFormat` with a :class:`Layout`. It finds the quantized weights of a folder (``schemes``) and
says what config.json has. Where a table cannot say how it differs, it overrides ``decode`` or ``encode``.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
import itertools
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad
from tqdm import tqdm

from nvfp4_tensor._compat.frames import warn_user
from nvfp4_tensor.checkpoints.checkpoint import Checkpoint, Entry, Format
from nvfp4_tensor.checkpoints.formats import fp8
from nvfp4_tensor.checkpoints.formats.mxfp4.values import MX_BLOCK, parts_of_mxfp4
from nvfp4_tensor.checkpoints.io.folder import FolderCheckpoint, warn_of_nan
from nvfp4_tensor.checkpoints.io.resumable_write import ResumableFolder, check_is_new, fingerprint
from nvfp4_tensor.checkpoints.io.safetensors import Plan, ShardFile, Shards, by_size, read_json, stem_of, write_json
from nvfp4_tensor.checkpoints.io.sidecar import SIDECAR, lost_factors, write_factors
from nvfp4_tensor.checkpoints.names import warn_of_activations, warn_of_mixed_groups, without_input_scale
from nvfp4_tensor.checkpoints.parts import LARGEST, LinearParts, nan_blocks
from nvfp4_tensor.checkpoints.understood import check_no_pre_scales, check_settings, check_understood
from nvfp4_tensor.numerics.layout import BLOCK, TILE_ROWS, ceil_to, scale_tiles, swizzle, unswizzle
from nvfp4_tensor.quantization.names import joined_with, some
from nvfp4_tensor.tensor.fp8 import FP8Spec, FP8Tensor

SHARD_BYTES = 4 << 30
"""The approximate size of a shard, if the source has only one."""

Shape: TypeAlias = tuple[int, ...]


class Number(enum.Enum):
    """What is stored for a per-tensor scale and for an input scale: the factor, its inverse, or 2688 times it."""

    FACTOR = enum.auto()
    DIVISOR = enum.auto()
    AMAX = enum.auto()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How a format stores a weight (N, K), or experts (E, N, K).

    Attributes:
        keys: the names of qdata, scale, per_tensor_scale and input_scale, of those that it has, and of further tensors:
            from the ``{name}`` of the weight, its ``{module}`` and ``{attribute}``, and its ``{stem}``, which is "m."
            for "m.weight" and "m.w_" for "m.w".
        codes: the dtype of codes. Each element has as many as fit, the first one in the lowest nibble.
        scale: the dtype of block scales; their bytes are e4m3, or e8m0 for MXFP4.
        number, number_shape: how the per-tensor scale and the input scale are stored. (1,) is also read as (), and ()
            as (1,).
        experts: the dimensions after E of the per-tensor scales of experts; None if they have one for all.
        swizzled: the shape of swizzled block scales, by the weight's shape; None if they have the weight's order.
        row_multiple: what rows are padded to; if it is not 1, columns are padded to a multiple of 16.
        swaps_nibbles: whether the even element is in the high nibble.
        ranks, names: the dimensions of weights that can be stored, and the pattern of their names.
    """

    keys: Mapping[str, str]
    codes: torch.dtype = torch.uint8
    scale: torch.dtype = torch.float8_e4m3fn
    number: Number = Number.FACTOR
    number_shape: Shape = ()
    experts: Shape | None = None
    swizzled: Callable[[Shape], Shape] | None = None
    row_multiple: int = 1
    swaps_nibbles: bool = False
    ranks: Shape = (2, 3)
    names: str = r".*"

    def keys_of(self, name: str) -> dict[str, str]:
        """Return the names of the tensors of a weight by what they are: qdata, scale and so on."""
        module, _, attribute = name.rpartition(".")
        stem = name.removesuffix("weight") if attribute == "weight" else f"{name}_"
        fields = {"name": name, "module": module, "attribute": attribute, "stem": stem}
        return {part: key.format_map(fields) for part, key in self.keys.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheme:
    """What the names, the configuration or the headers of a folder say of a quantized weight.

    Attributes:
        activations: whether products quantize the activations.
        scaled, static: whether it must have a per-tensor scale, and an input scale. If not, it may.
        dtype: what it decodes to; by default what config.json has.
        shape, scale_shape: the logical shape, and that of the stored block scales, if the codes do not determine them.
        swizzled: whether block scales are swizzled, if the layout has that order.
        group: the number of elements of a block, 32 for MXFP4.
        loses_activations: whether activations are quantized otherwise than to NVFP4, which is left out.
        fp8: how it is scaled if it is FP8; of the other attributes, only ``static`` then has a meaning.
    """

    activations: bool = False
    scaled: bool = True
    static: bool = False
    dtype: torch.dtype | None = None
    shape: Shape | None = None
    scale_shape: Shape | None = None
    swizzled: bool = True
    group: int = BLOCK
    loses_activations: bool = False
    fp8: FP8Spec | None = None


class TableFormat(Format):
    """A format of safetensors files that stores weights as a table says.

    Attributes:
        layout: the table.
        reserved: suffixes of its own tensors, which no dense tensor may have.
        is_static: whether its readers need input scales for all W4A4 weights.
        config_files, config_keys: where the configuration is, and its names in config.json.
        has_pre_scales: whether a weight may have a scale of its inputs (AWQ), as :func:`pre_scale_of` names it.
        fp8_name: its name for an FP8 weight with this entry, or None; None if it has no FP8 weights.
        unwritable: why it cannot be written, and what to choose instead; "" if it can.
    """

    layout: Layout
    reserved: ClassVar[tuple[str, ...]] = ()
    is_static: ClassVar[bool] = False
    config_files: ClassVar[str] = "config.json"
    config_keys: ClassVar[tuple[str, ...]] = ("quantization_config",)
    has_pre_scales: ClassVar[bool] = False
    fp8_name: Callable[[Entry], object] | None = None
    unwritable: ClassVar[str] = ""

    def is_own(self, found: Mapping[str, Any]) -> bool:
        """Return whether a configuration is of this format."""
        return found.get("quant_method") == self.name

    def configuration(self, folder: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the configuration of a folder with this config.json, or None."""
        found = next((config[key] for key in self.config_keys if config.get(key)), None)
        return found if isinstance(found, dict) and self.is_own(found) else None

    def detect(self, path: Path) -> bool:
        file = path / "config.json"
        try:
            return path.is_dir() and self.configuration(path, read_json(file) if file.is_file() else {}) is not None
        except (ValueError, OSError):
            return False

    def quantization(self, folder: Path, config: dict[str, Any]) -> dict[str, Any]:
        """Return the quantization settings of a folder, and remove them from ``config``, which is config.json.

        Raises:
            ValueError: the folder has another format, or a kind of quantization that is not supported.
        """
        found = self.configuration(folder, config)
        if found is None:
            raise ValueError(
                f"{folder}: expected the configuration of {self.name} in {self.config_files}, found "
                f"{method_of(config) or 'none'}"
            )
        for key in self.config_keys:
            config.pop(key, None)
        check_settings(folder / self.config_files, found)
        return found

    @abc.abstractmethod
    def schemes(self, checkpoint: FolderCheckpoint) -> dict[str, Scheme]:
        """Return the quantized weights of a folder by their names in a model.

        Raises:
            ValueError: the configuration, or a tensor without its weight, says that there is something else.
        """

    def entries(self, checkpoint: FolderCheckpoint) -> dict[str, Entry]:
        """Return the parameters of a folder; check that each linear has its tensors, with their dtypes and shapes."""
        schemes = self.schemes(checkpoint)
        keys = {name: fp8.keys_of(name) if each.fp8 else self.layout.keys_of(name) for name, each in schemes.items()}
        parts = {key for each in keys.values() for key in each.values()}
        entries = {name: entry for name, entry in entries_of(checkpoint.shards).items() if name not in parts}
        for name, scheme in schemes.items():
            if scheme.fp8 is not None:
                entries[name] = fp8.entry_of(checkpoint, name, scheme.fp8, scheme.static)
            else:
                entries[name] = self._entry(checkpoint, keys[name], scheme)
        if lost := [name for name, each in schemes.items() if each.loses_activations]:
            warn_user(
                f"{checkpoint.path}: the activations of {some(lost)} are MXFP4, which is not computed: their products "
                "are weight-only"
            )
        if self.is_static and (missing := without_input_scale(entries)):
            raise ValueError(
                f"{checkpoint.path}: tensor {keys[missing[0]]['input_scale']} is missing: "
                f"{some(missing)} have no input scale, but other weights do"
            )
        return entries

    def _entry(self, checkpoint: FolderCheckpoint, keys: Mapping[str, str], scheme: Scheme) -> Entry:
        layout, owner, per_word = self.layout, keys["qdata"], 2 * self.layout.codes.itemsize
        codes = checkpoint.shards.info.get(owner)
        if codes is None or codes.dtype != layout.codes or not (scheme.shape or len(codes.shape) in layout.ranks):
            wanted = f"{str(layout.codes).removeprefix('torch.')} (N, K / {per_word})"
            place = checkpoint.path if codes is None else codes.file
            raise ValueError(f"{place}: tensor {owner}: expected {wanted}, found {codes or 'none'}")
        shape = scheme.shape or (*codes.shape[:-1], codes.shape[-1] * per_word)
        if shape[-1] % scheme.group and layout.row_multiple == 1:
            wanted = f"columns in multiples of {scheme.group}"
            raise ValueError(f"{codes.file}: tensor {owner}: expected {wanted}, found {codes}")
        scale_shape = scheme.scale_shape or (*shape[:-1], shape[-1] // scheme.group)
        if layout.swizzled is not None and scheme.swizzled:
            scale_shape = layout.swizzled(shape)
            if len(shape) == 3 and shape[1] % TILE_ROWS:
                wanted = f"experts with rows in multiples of {TILE_ROWS}"
                raise ValueError(f"{codes.file}: tensor {owner}: expected {wanted}, found {codes}")
        is_mx = scheme.group == MX_BLOCK
        checkpoint.expect(keys["scale"], torch.uint8 if is_mx else layout.scale, scale_shape, owner)
        experts = shape[:1] if len(shape) == 3 else ()
        factor = self._number(checkpoint, keys, "per_tensor_scale", scheme.scaled, experts)
        has_own = is_mx or (layout.experts is not None and bool(factor))
        static = self._number(checkpoint, keys, "input_scale", scheme.static) if scheme.activations else None
        return Entry(
            shape=shape,
            dtype=scheme.dtype or checkpoint.dtype(),
            quantized=True,
            quantizes_activations=scheme.activations,
            has_input_scale=static is not None,
            scales=(*experts, 1) if experts and has_own else (),
            group=scheme.group,
            shard=codes.file.name,
        )

    def _number(
        self, checkpoint: FolderCheckpoint, keys: Mapping[str, str], part: str, required: bool, experts: Shape = ()
    ) -> Shape | None:
        """Check a scale, and return its shape; None if there is none, and none is required."""
        key = keys.get(part)
        found = checkpoint.shards.info.get(key or "")
        if key is None or (found is None and not required):
            return None
        shape: Shape = (1,) if found is not None and found.shape == (1,) else ()
        if experts and self.layout.experts is not None and found is not None and found.shape:
            shape = (*experts, *self.layout.experts)
        checkpoint.expect(key, torch.float32, shape, keys["qdata"])
        return shape

    def config_of(self, checkpoint: Checkpoint) -> dict[str, Any] | None:
        """Return the quantization_config of ``checkpoint`` for config.json, or None to omit it."""
        return None

    def decode(self, name: str, tensors: Mapping[str, Tensor], entry: Entry) -> LinearParts:
        """Return the parts of the weight ``name`` from the format's tensors."""
        layout, keys = self.layout, self.layout.keys_of(name)
        codes, scale = tensors[keys["qdata"]].view(torch.uint8), tensors[keys["scale"]]
        *leading, columns = entry.shape
        if entry.group == MX_BLOCK:
            return parts_of_mxfp4(codes, scale)
        blocks, rows = ceil_to(columns, BLOCK) // BLOCK, math.prod(leading)
        if layout.row_multiple > 1:
            codes = codes[:rows]
        if layout.swizzled is not None and scale.shape == layout.swizzled(entry.shape):
            scale = unswizzle(scale.reshape(*scale_tiles(rows, blocks * BLOCK), 32, 16), rows, blocks)
        factor, divisor = self._factor(tensors.get(keys.get("per_tensor_scale", "")), entry.scales)
        input_scale, input_divisor = None, None
        if entry.has_input_scale:
            input_scale, input_divisor = self._factor(tensors[keys["input_scale"]], ())
        return LinearParts(
            qdata=swap_nibbles(codes) if layout.swaps_nibbles else codes,
            scale=scale.view(torch.float8_e4m3fn).reshape(*leading, blocks),
            per_tensor_scale=factor,
            columns=columns,
            quantizes_activations=entry.quantizes_activations,
            input_scale=input_scale,
            divisor=divisor,
            input_divisor=input_divisor,
        )

    def _factor(self, stored: Tensor | None, shape: Shape) -> tuple[Tensor, Tensor | None]:
        """Return the factor that a stored number is, or 1, and the number if it is a divisor."""
        if stored is None:
            return torch.ones((), dtype=torch.float32), None
        stored = stored.reshape(shape)
        if self.layout.number is Number.DIVISOR:
            return stored.reciprocal(), stored
        return stored / LARGEST if self.layout.number is Number.AMAX else stored, None

    def encode(self, name: str, weight: LinearParts | FP8Tensor, entry: Entry) -> dict[str, Tensor]:
        """Return the format's tensors of the weight ``name``. One on the meta device gives tensors on it."""
        if isinstance(weight, FP8Tensor):
            return fp8.encode(name, weight, self.layout.number_shape, tuple(weight.scale.shape))
        layout, keys = self.layout, self.layout.keys_of(name)
        codes, scale = weight.qdata, weight.scale
        if layout.row_multiple > 1:
            codes = pad(codes, (0, 0, 0, -len(codes) % layout.row_multiple))
        if layout.swizzled is not None:
            scale = swizzle(scale.reshape(-1, scale.shape[-1])).reshape(layout.swizzled(entry.shape))
        tensors = {
            keys["qdata"]: (swap_nibbles(codes) if layout.swaps_nibbles else codes).view(layout.codes),
            keys["scale"]: scale.view(layout.scale),
        }
        factor, static = weight.per_tensor_scale, weight.input_scale
        if layout.number is Number.DIVISOR:
            factor, static = weight.weight_divisor(), weight.activation_divisor()
        if layout.number is Number.AMAX:
            factor = factor * LARGEST
        for part, number in ("per_tensor_scale", factor), ("input_scale", static):
            if number is None or part not in keys:
                continue
            if layout.number is not Number.FACTOR and not number.is_meta and not number.isfinite().all():
                raise ValueError(
                    f"{name}: its scale is too small or too large for {self.name}, because {keys[part]} would be "
                    "infinite"
                )
            shape = layout.number_shape
            if part == "per_tensor_scale" and entry.scales and layout.experts is not None:
                shape = (*entry.scales[:1], *layout.experts)
            tensors[keys[part]] = number.reshape(shape)
        return tensors

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise a ValueError with the names of tensors that this format cannot store, or would take for others."""
        layout, entries = self.layout, checkpoint.entries
        quantized = {name: entry for name, entry in entries.items() if entry.quantized}
        dense = [name for name, entry in entries.items() if not entry.is_coded]
        if reserved := [name for name in dense if self.reserved and name.endswith(self.reserved)]:
            raise ValueError(
                f"{self.name} reserves such names for quantized weights, but {some(reserved)} are dense: rename them"
            )
        own = [key for name in quantized for key in layout.keys_of(name).values()]
        own += [key for name, entry in entries.items() if entry.fp8 for key in fp8.keys_of(name).values()]
        if taken := [key for key in own if key in entries and not entries[key].is_coded]:
            raise ValueError(
                f"{self.name} uses such names for scales of quantized weights, and {some(taken)} are dense: rename them"
            )
        if quantized and not layout.keys:
            raise ValueError(
                f"the format {self.name} has no NVFP4, but {some([*quantized])} are NVFP4: choose another format"
            )
        if not self.has_pre_scales:
            check_no_pre_scales(entries, self.name)
        check_understood(entries, checkpoint.path, self.has_pre_scales)
        fp8.check(entries, self.name, self.fp8_name)
        many = [name for name, entry in quantized.items() if entry.scales and len(entry.shape) == 2]
        if many and "per_tensor_scale" in layout.keys:
            raise ValueError(
                f"{self.name} has one per-tensor scale per weight, but {some(many)} have one per row, as joined "
                "linears do: split them before saving"
            )
        odd = [f"{name} {list(entry.shape)}" for name, entry in quantized.items() if entry.shape[-1] % BLOCK]
        if odd and layout.row_multiple == 1:
            raise ValueError(f"{self.name} needs columns in multiples of {BLOCK}: leave {some(odd)} dense")
        odd = [
            f"{name} {list(entry.shape)}"
            for name, entry in quantized.items()
            if len(entry.shape) not in layout.ranks or 0 in entry.shape or not re.fullmatch(layout.names, name)
        ]
        if odd:
            shapes = " or (E, N, K)" if 3 in layout.ranks else ""
            raise ValueError(
                f"{self.name} stores NVFP4 weights (N, K){shapes} of modules, with names like m.weight, not {some(odd)}"
            )
        if self.is_static:
            dynamic = [n for n, e in quantized.items() if e.quantizes_activations and not e.has_input_scale]
            if dynamic:
                raise ValueError(
                    f"{some(dynamic)} quantize activations by the amax of each call, but {self.name} needs a static "
                    "input scale: use calibrate(model, batches), after model.requires_grad_() if it is NVFP4 already, "
                    "or write only the weights with weight_only=True"
                )
            warn_of_mixed_groups(checkpoint)
            warn_of_activations(checkpoint.entries)

    def files_of(self, checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
        """Return further JSON files of the format, by name."""
        return {}

    def metadata(self, checkpoint: Checkpoint) -> dict[str, str]:
        """Return the metadata for the header of each shard."""
        return {"format": "pt"}

    def read(self, path: Path) -> FolderCheckpoint:
        return FolderCheckpoint(self, Path(path))

    def write(
        self, checkpoint: Checkpoint, path: Path, *, progress: bool = True, shard_bytes: int | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        """See :meth:`Format.write`. If a call is interrupted, the same call with an unchanged source continues after
        its last complete shard.

        Args:
            shard_bytes: the maximum size of a file. By default, the files are those of the source if it has several,
                and have 4 GiB otherwise.
        """
        if self.unwritable:
            raise ValueError(self.unwritable)
        if options:
            hints = {"to": "; checkpoints.save calls it format", "format": "; checkpoints.quantize calls it to"}
            hint = "".join(hints.get(name, "") for name in options)
            raise ValueError(f"{self.name} has no option {', '.join(options)}{hint}")
        path = Path(path)
        self.check(checkpoint)
        check_is_new(path, checkpoint)
        plan = self._plan(checkpoint, shard_bytes)
        with ResumableFolder(path, fingerprint(self.name, checkpoint, shard_bytes)) as state:
            self._write_shards(checkpoint, plan, state, progress)
            self._write_rest(checkpoint, plan, state)
            checkpoint.check_unchanged()
            state.finish()

    def _plan(self, checkpoint: Checkpoint, shard_bytes: int | None) -> Plan:
        """Distribute parameters over files. Linears that servers join are adjacent, because they are quantized
        together."""
        entries, tensors_of = checkpoint.entries, {}
        for name in dict.fromkeys(itertools.chain.from_iterable(joined_with(each, entries) for each in entries)):
            tensors_of[name] = {name: torch.empty(entries[name].shape, dtype=entries[name].dtype, device="meta")}
            if entries[name].is_coded:
                tensors_of[name] = self.encode(name, entries[name].meta(), entries[name])
        sources = {str(entry.shard) for entry in entries.values()}
        if shard_bytes is not None or len(sources) < 2 or not all(each.endswith(".safetensors") for each in sources):
            return by_size(tensors_of, SHARD_BYTES if shard_bytes is None else shard_bytes, stem_of(checkpoint.config))
        plan: Plan = {source: {} for source in sorted(sources)}
        for name, tensors in tensors_of.items():
            plan[str(entries[name].shard)][name] = tensors
        return plan

    def _write_shards(self, checkpoint: Checkpoint, plan: Plan, state: ResumableFolder, progress: bool) -> None:
        total = sum(entry.nbytes for entry in checkpoint.entries.values())
        bar = tqdm(total=total, desc=f"writing {state.path.name}", unit="B", unit_scale=True, disable=not progress)
        with bar:
            for file, names in plan.items():
                if state.is_done(file):
                    bar.update(sum(checkpoint.entries[name].nbytes for name in names))
                else:
                    state.done(file, *self._write_shard(checkpoint, state.folder / file, names, bar))

    def _write_shard(
        self, checkpoint: Checkpoint, file: Path, names: Mapping[str, Mapping[str, Tensor]], bar: tqdm
    ) -> tuple[int, dict[str, Any], list[str]]:
        """Write a shard. Return its size in bytes, the factors for the sidecar, and its linears with NaN."""
        tensors = {key: tensor for tensors_of in names.values() for key, tensor in tensors_of.items()}
        factors: dict[str, Any] = {}
        with_nan: list[str] = []
        with ShardFile(file, tensors, self.metadata(checkpoint)) as shard:
            for name in names:
                entry = checkpoint.entries[name]
                if not entry.is_coded:
                    for chunk in checkpoint.chunks(name):
                        shard.write(name, chunk)
                    bar.update(entry.nbytes)
                    continue
                value: Any = checkpoint.value(name)
                shard.write_later(self.encode(name, value, entry))
                if isinstance(value, LinearParts):
                    if lost := lost_factors(value, stores_divisors=self.layout.number is Number.DIVISOR):
                        factors[name] = lost
                    if nan_blocks(value):
                        with_nan.append(name)
                bar.update(entry.nbytes)
            checkpoint.check_unchanged()
            shard.finish()
        return shard.nbytes, factors, with_nan

    def _write_rest(self, checkpoint: Checkpoint, plan: Plan, state: ResumableFolder) -> None:
        """Write the index, configs and sidecar, and copy the other files of the source."""
        checkpoint.write_auxiliary_files(state.folder)
        tensors = [(key, t, file) for file, names in plan.items() for of in names.values() for key, t in of.items()]
        if len(plan) > 1:
            total, where = sum(tensor.nbytes for _, tensor, _ in tensors), {key: file for key, _, file in tensors}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
            write_json(state.folder / f"{stem_of(checkpoint.config)}.safetensors.index.json", index)
        quantization = self.config_of(checkpoint)
        config = checkpoint.config | ({} if quantization is None else {"quantization_config": quantization})
        files = {"config.json": config} if config else {}
        for name, value in (files | self.files_of(checkpoint)).items():
            write_json(state.folder / name, value)
        write_factors(state.folder / SIDECAR, state.factors)
        warn_of_nan(state.with_nan)


def entries_of(shards: Shards) -> dict[str, Entry]:
    """Return the entries of tensors that are all dense."""
    return {name: Entry(shape=info.shape, dtype=info.dtype, shard=info.file.name) for name, info in shards.info.items()}


def swap_nibbles(codes: Tensor) -> Tensor:
    """Swap the nibbles of each byte, uint8 of any shape."""
    return codes >> 4 | codes << 4


def method_of(config: Mapping[str, Any]) -> object:
    """Return the quant_method of config.json, or None."""
    found = config.get("quantization_config")
    return found.get("quant_method") if isinstance(found, dict) else None
