"""FSDP2 of weights that train in NVFP4: each rank quantizes its shard, and FSDP2 gathers codes instead of bfloat16.

The codes equal those of the full weight on one GPU, bit for bit: no 16x16 block crosses shards, and the per-tensor
scale comes from the amax of all shards.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple, SupportsIndex
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from nvfp4_tensor.dispatch.table import written_by
from nvfp4_tensor.dispatch.writes import count_write_to, writes_of
from nvfp4_tensor.distributed.agreement import M, check_agreement
from nvfp4_tensor.distributed.bits import axis_of
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.sharding import fsdp_transport
from nvfp4_tensor.sharding.layout import ShardedDim, all_reduce_amax
from nvfp4_tensor.tensor.description import Args, Kwargs, Op, Types
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor
from nvfp4_tensor.training.config import training_linears
from nvfp4_tensor.training.linear.cache import optimizer_steps
from nvfp4_tensor.training.linear.module import NVFP4TrainingLinear
from nvfp4_tensor.training.recipe import Recipe


def enable_nvfp4_all_gather(model: M) -> M:
    """Let FSDP2 gather the weights of a model's NVFP4 training linears as codes, which have 0.28 of bfloat16's bytes.

    Call it before ``fully_shard``. Otherwise FSDP2 gathers the weights in bfloat16 or float32. The shards stay in that
    dtype for the optimizer and for checkpoints. ``parameters()`` yields the shards, even while
    reshard_after_forward=False keeps the codes. :func:`precompute_amaxes`, called after each optimizer step, replaces
    one all-reduce per weight with one for all weights.

    Returns:
        the same model.

    Raises:
        ValueError: if no linear trains in NVFP4, a recipe's backward reads the unquantized weight, ``fully_shard`` was
            called before, or a weight is tied to a module that does not read the same codes.

    >>> for layer in enable_nvfp4_all_gather(model).layers:
    ...     fully_shard(layer)
    >>> fully_shard(model)
    """
    linears = training_linears(model)
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError(
            "enable_nvfp4_all_gather was called after fully_shard, which decides how a weight is gathered: call it "
            "before fully_shard"
        )
    specs = {name: _weight_spec(linear, name) for name, linear in linears.items()}
    _check_tied(model, linears, specs)
    converted: dict[Tensor, nn.Parameter] = {}  # tied weights stay tied
    for linear in linears.values():
        weight = linear.weight
        if not isinstance(weight, DTensor):
            if weight not in converted:
                converted[weight] = nn.Parameter(MasterShard(weight.detach()), weight.requires_grad)
            linear.weight = converted[weight]
        elif not isinstance(weight._local_tensor, MasterShard):  # sharded by tensor parallelism
            weight._local_tensor = MasterShard(weight._local_tensor.detach())
    return model


@torch.no_grad()
def precompute_amaxes(model: nn.Module) -> None:
    """Compute the amaxes of all weights gathered as codes, in one all-reduce. Call it after each optimizer step.

    The call is optional. A shard that has no amax, or has changed since, computes it with an all-reduce of its own.

    >>> optimizer.step()
    >>> precompute_amaxes(model)
    """
    by_axes: dict[tuple[tuple[ShardedDim, ...], str], list[MasterShard]] = {}
    for linear in training_linears(model).values():
        weight = linear.weight
        if isinstance(weight, DTensor) and isinstance(weight._local_tensor, MasterShard):
            key = _axes_of(weight), weight.device_mesh.device_type
            by_axes.setdefault(key, []).append(weight._local_tensor)
    for (axes, device), shards in by_axes.items():  # the mesh's device: with CPU offload, shards are on the CPU
        amaxes = all_reduce_amax(torch.stack([shard.own_amax() for shard in shards]).to(device), axes)
        for shard, amax in zip(shards, amaxes.unbind(), strict=True):
            shard.keep_amax(amax)


def _axes_of(weight: DTensor) -> tuple[ShardedDim, ...]:
    """Return the dimensions of the mesh over which the weight is sharded."""
    mesh = weight.device_mesh
    shared = [dim for dim, placement in enumerate(weight.placements) if not placement.is_replicate()]
    return tuple(
        ShardedDim(mesh.get_local_rank(dim), mesh.size(dim), (mesh.get_group(dim).group_name,)) for dim in shared
    )


def _weight_spec(linear: nn.Module, name: object) -> QuantizeSpec:
    """Return the spec that quantizes a linear's weight; raise a ValueError if its products do not read only codes."""
    recipe = linear.active_recipe if isinstance(linear, NVFP4TrainingLinear) else None
    if recipe is None or recipe.w is None or recipe.w.is_stochastic:
        reason = "does not quantize its weight" if recipe is None or recipe.w is None else "rounds it stochastically"
    elif not recipe.dgrad_reads_codes:
        reason = "reads the unquantized weight in the backward"
    else:
        return recipe.w
    raise ValueError(
        f"the recipe of {name} {reason}, so FSDP2 cannot gather its weight as codes: use a model without "
        "enable_nvfp4_all_gather, or another recipe"
    )


def _check_tied(
    model: nn.Module, linears: Mapping[str, NVFP4TrainingLinear], specs: Mapping[str, QuantizeSpec]
) -> None:
    """Raise a ValueError if a weight is tied to a module that does not read the same codes."""
    first: dict[Tensor, str] = {}
    for name, linear in linears.items():
        other = first.setdefault(linear.weight, name)
        if specs[other] != specs[name]:
            raise ValueError(
                f"the weights of {other} and {name} are tied, but their recipes quantize them by {specs[other]} and "
                f"by {specs[name]}: set the same recipe for both"
            )
    for name, module in model.named_modules():
        for parameter in [] if name in linears else module.parameters(recurse=False):
            if parameter in first:
                raise ValueError(
                    f"the weight of {first[parameter]} is tied to {name} ({type(module).__name__}), which does not "
                    "support codes: keep that linear dense, or use a model without enable_nvfp4_all_gather"
                )


class _GatherState(NamedTuple):
    """The metadata that FSDP2 passes from the pre-all-gather hook to the post-all-gather hook."""

    shard: NVFP4Tensor
    metadata: fsdp_transport.GatherMetadata


_OPS_THAT_KEEP_THE_CLASS = {
    "_pin_memory", "_to_copy", "alias", "as_strided", "clone", "detach", "empty_like", "new_empty", "new_zeros",
    "slice", "split", "view",
}  # fmt: skip
"""Operators that FSDP2, DTensor and nn.Module apply to parameters. All other operators return plain tensors."""


class MasterShard(Tensor):
    """A weight, or a shard of one, that FSDP2 gathers as codes; otherwise, and in files, an ordinary dense tensor."""

    _amax: tuple[tuple, Tensor] | None = None
    """(state, amax of the full weight)."""
    _codes: tuple[tuple, NVFP4Tensor] | None = None
    """(state, codes) of the last gather, to reuse in the gather of the backward."""

    @staticmethod
    def __new__(cls, data: Tensor) -> MasterShard:
        return torch.Tensor._make_subclass(cls, data)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares another
        cls, func: Op, types: Types, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for t in written_by(func, args, kwargs):
                if isinstance(t, MasterShard):
                    count_write_to(t.untyped_storage())
                    t._codes = None
        with torch._C._DisableTorchDispatch():
            result = func(*args, **kwargs)
            if func._schema.name.removeprefix("aten::") not in _OPS_THAT_KEEP_THE_CLASS:
                return result
            shards = [cls(t) for t in (result if isinstance(result, tuple | list) else [result])]
        if func is torch.ops.aten._to_copy.default:  # CPU offload calls it before each gather
            source = args[0]
            if source.dtype == shards[0].dtype and source._amax is not None and source._amax[0] == source._state():
                shards[0].keep_amax(source._amax[1])
        return shards if isinstance(result, tuple | list) else shards[0]

    def plain(self) -> Tensor:
        """Return this tensor as a plain Tensor that shares its storage."""
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            return self.as_subclass(Tensor).detach()

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return self.plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict) -> MasterShard:
        copied = MasterShard(copy.deepcopy(self.plain(), memo))
        return copied if not isinstance(self, nn.Parameter) else nn.Parameter(copied, self.requires_grad)  # type: ignore[return-value]

    def own_amax(self) -> Tensor:
        """Return the amax of this shard, float32 0-d."""
        return torch.ops.nvfp4.amax(self.plain(), -1)

    def keep_amax(self, amax: Tensor) -> None:
        """Cache the amax of the full weight until this shard changes."""
        self._amax = self._state(), amax

    @property
    def _writes(self) -> int:
        """The number of writes to this storage: local tensors of DTensors have no version counter."""
        return writes_of(self.untyped_storage())

    def _state(self) -> tuple:
        """Return values that change when the shard is written to."""
        return self._writes, self.data_ptr(), optimizer_steps()

    def _global_amax(self, axes: tuple[ShardedDim, ...]) -> Tensor:
        if self._amax is None or self._amax[0] != self._state():
            self.keep_amax(all_reduce_amax(self.own_amax(), axes))
        assert self._amax is not None
        return self._amax[1]

    # --- FSDP2's hooks -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[Tensor, ...], _GatherState]:
        spec = _weight_spec(module, module)
        fsdp_transport.check_shard(self.shape, outer_size, mesh.size(), module, spec.block_rows)
        if self.shape[0] % spec.block_rows:
            raise ValueError(
                f"the weight of {module} has {self.shape[0]} rows on each of {mesh.size()} ranks, which is not a "
                f"multiple of the {spec.block_rows} rows of its blocks: choose another world size, or use a model "
                "without enable_nvfp4_all_gather"
            )
        _check_recipes_agree(module, mesh)
        codes = self._codes_for(spec, mp_policy.param_dtype or self.dtype, mesh, module)
        inputs, metadata = fsdp_transport.pre_all_gather(codes, mesh, outer_size, outer_stride, module, mp_policy)
        return inputs, _GatherState(codes, metadata)

    def _codes_for(self, spec: QuantizeSpec, dtype: torch.dtype, mesh: DeviceMesh, module: nn.Module) -> NVFP4Tensor:
        """Return this shard's codes: quantized for the gather of the forward, and reused once, for the backward.

        In the backward, quantization would wait for the products, and the gather for the quantization.
        """
        key = (*self._state(), spec, dtype)
        cached, self._codes = self._codes, None
        if cached is None or cached[0] != key:
            with fsdp_transport.own_memory(self.device):
                codes = self._quantize(spec, dtype, mesh, module)
            self._codes = key, codes
            return codes
        return cached[1]

    def _quantize(self, spec: QuantizeSpec, dtype: torch.dtype, mesh: DeviceMesh, module: nn.Module) -> NVFP4Tensor:
        sharding = getattr(module, "sharding", None)
        axes = (axis_of(mesh),)
        amax = self._global_amax(axes if sharding is None else (*axes, *sharding.w))
        amax = amax.to(dtype).float()  # equals the amax of the weight in this dtype, because rounding is monotonic
        qdata, scale, per_tensor_scale = torch.ops.nvfp4.quantize(self.plain().to(dtype), amax, None, spec.pack())
        return NVFP4Tensor._of_parts(qdata, scale, per_tensor_scale, self.shape[1], dtype, spec)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: _GatherState,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        return fsdp_transport.post_all_gather(metadata.shard, all_gather_outputs, metadata.metadata, param_dtype, out)


_agreed: WeakKeyDictionary[nn.Module, Recipe] = WeakKeyDictionary()
"""The recipe that all ranks agreed on, per linear. The shard cannot keep it: CPU offload copies it in each gather."""


def _check_recipes_agree(module: nn.Module, mesh: DeviceMesh) -> None:
    """Raise the same ValueError on all ranks if their recipes differ; checked once per recipe, before the gather."""
    assert isinstance(module, NVFP4TrainingLinear)
    if mesh.size() > 1 and _agreed.get(module) != module.recipe:
        name = f"a linear of {module.in_features} inputs and {module.out_features} outputs"
        check_agreement("the recipe", {name: module.recipe}, mesh.get_group())
        _agreed[module] = module.recipe
