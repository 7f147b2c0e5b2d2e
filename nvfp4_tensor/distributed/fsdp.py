"""FSDP2 of weights that train in NVFP4: each rank quantizes its shard, and codes travel in place of bfloat16.

The codes are those that one GPU would have made of the whole weight, bit for bit: blocks of 16x16 do not straddle
shards, and the per-tensor scale comes from the amax of all of them.
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
from torch.utils._pytree import tree_leaves

from nvfp4_tensor.distributed.agreement import M, check_agreement
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.sharding import fsdp_transport as gather
from nvfp4_tensor.sharding.layout import ShardedDim, all_reduce_amax
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor
from nvfp4_tensor.tensor.protocol import Args, Kwargs, Op, Types
from nvfp4_tensor.training.config import training_linears
from nvfp4_tensor.training.linear.cache import optimizer_steps
from nvfp4_tensor.training.linear.module import NVFP4TrainingLinear
from nvfp4_tensor.training.recipe import Recipe, WeightForDx


def enable_nvfp4_all_gather(model: M) -> M:
    """Let FSDP2 gather the weights of a model's NVFP4 training linears as codes: 0.28 of bfloat16's bytes.

    Call it before ``fully_shard``. The shards stay what they were, bfloat16 or float32, for the optimizer and for
    checkpoints, and are what ``parameters()`` yields, also while reshard_after_forward=False keeps the codes; without
    this call FSDP2 gathers them as they are. :func:`precompute_amaxes` after each step of the
    optimizer makes one all-reduce of what is one a weight otherwise.

    Returns:
        the same model.

    Raises:
        ValueError: no linear trains in NVFP4, a recipe whose backward reads the weight as it was, a model that
            ``fully_shard`` has had already, or a weight that is tied to a module which does not take its codes.

    >>> for layer in enable_nvfp4_all_gather(model).layers:
    ...     fully_shard(layer)
    >>> fully_shard(model)
    """
    linears = training_linears(model)
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError(
            "enable_nvfp4_all_gather comes before fully_shard, which looks once at how a weight is gathered"
        )
    specs = {name: _weight_spec(linear, name) for name, linear in linears.items()}
    _check_tied(model, linears, specs)
    made: dict[Tensor, nn.Parameter] = {}  # one for all linears that a weight is tied to
    for linear in linears.values():
        weight = linear.weight
        if not isinstance(weight, DTensor):
            if weight not in made:
                made[weight] = nn.Parameter(MasterShard(weight.detach()), weight.requires_grad)
            linear.weight = made[weight]
        elif not isinstance(weight._local_tensor, MasterShard):  # sharded by tensor parallelism
            weight._local_tensor = MasterShard(weight._local_tensor.detach())
    return model


@torch.no_grad()
def precompute_amaxes(model: nn.Module) -> None:
    """Compute the amaxes of all weights gathered as codes, in one all-reduce; call it after each optimizer step.

    Nothing is wrong without it, or when a weight changes after it: a shard whose amax is out of date finds it anew.

    >>> optimizer.step()
    >>> precompute_amaxes(model)
    """
    by_axes: dict[tuple[tuple[ShardedDim, ...], str], list[MasterShard]] = {}
    for linear in training_linears(model).values():
        weight = linear.weight
        if isinstance(weight, DTensor) and isinstance(weight._local_tensor, MasterShard):
            key = _axes_of(weight), weight.device_mesh.device_type
            by_axes.setdefault(key, []).append(weight._local_tensor)
    for (axes, device), shards in by_axes.items():  # of the mesh: shards that CPU offload keeps are elsewhere
        amaxes = all_reduce_amax(torch.stack([shard.own_amax() for shard in shards]).to(device), axes)
        for shard, amax in zip(shards, amaxes.unbind(), strict=True):
            shard.keep_amax(amax)


def _axes_of(weight: DTensor) -> tuple[ShardedDim, ...]:
    """The dimensions of the mesh that share the weight."""
    mesh = weight.device_mesh
    shared = [
        dim for dim, placement in enumerate(weight.placements) if placement.is_shard() or not placement.is_replicate()
    ]
    return tuple(
        ShardedDim(mesh.get_local_rank(dim), mesh.size(dim), (mesh.get_group(dim).group_name,)) for dim in shared
    )


def _weight_spec(linear: nn.Module, name: object) -> QuantizeSpec:
    """By what the weight travels; a ValueError where it cannot as codes."""
    recipe = linear.active_recipe if isinstance(linear, NVFP4TrainingLinear) else None
    if recipe is None or recipe.w is None or recipe.w.is_stochastic:
        what = "quantizes no weight" if recipe is None or recipe.w is None else "rounds weights stochastically"
    elif recipe.w_for_dx not in (WeightForDx.CODES, WeightForDx.EXACT):
        what = "reads the weight as it was in the backward"
    else:
        return recipe.w
    raise ValueError(
        f"{name} {what}, by its recipe, and so needs more than the codes of its weight: let FSDP2 gather it as it is, "
        "by a model without enable_nvfp4_all_gather, or choose another recipe"
    )


def _check_tied(
    model: nn.Module, linears: Mapping[str, NVFP4TrainingLinear], specs: Mapping[str, QuantizeSpec]
) -> None:
    """A ValueError where a weight is also that of a module which does not read the same codes."""
    first: dict[Tensor, str] = {}
    for name, linear in linears.items():
        other = first.setdefault(linear.weight, name)
        if specs[other] != specs[name]:
            raise ValueError(
                f"the weight of {other} is that of {name} too, and their recipes quantize it by {specs[other]} and by "
                f"{specs[name]}: give both one recipe"
            )
    for name, module in model.named_modules():
        for parameter in [] if name in linears else module.parameters(recurse=False):
            if parameter in first:
                raise ValueError(
                    f"the weight of {first[parameter]} is that of {name} ({type(module).__name__}) too, which does not "
                    "take codes: keep that linear dense, or let FSDP2 gather it as it is, by a model without "
                    "enable_nvfp4_all_gather"
                )


class _Codes(NamedTuple):
    """What goes from one of FSDP2's hooks to the other."""

    shard: NVFP4Tensor
    rest: gather.Rest


_KEEP = {
    "_pin_memory", "_to_copy", "alias", "as_strided", "clone", "detach", "empty_like", "new_empty", "new_zeros",
    "slice", "split", "view",
}  # fmt: skip
"""Operators by which FSDP2, DTensor and nn.Module move a parameter about; what others give is a plain tensor."""


class MasterShard(Tensor):
    """A weight, or a shard of one, that FSDP2 gathers as codes. In all else, files too, the tensor that it is."""

    _writes: list[int]
    """How often this storage was written to, for all views of it: a DTensor's local tensor counts no versions."""
    _amax: tuple[tuple, Tensor] | None = None
    _codes: tuple[tuple, NVFP4Tensor] | None = None
    """What the last gather sent, with the state that it was made of: for the gather of the backward."""

    @staticmethod
    def __new__(cls, data: Tensor) -> MasterShard:
        self = torch.Tensor._make_subclass(cls, data)
        self._writes = [0]
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares another
        cls, func: Op, types: Types, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            _count_writes(func, args, kwargs)
        with torch._C._DisableTorchDispatch():
            result = func(*args, **kwargs)
            if func._schema.name.removeprefix("aten::") not in _KEEP:
                return result
            kept = [cls(t) for t in (result if isinstance(result, tuple | list) else [result])]
        if func.is_view:
            for t in kept:
                t._writes = args[0]._writes
        elif func is torch.ops.aten._to_copy.default:  # as CPU offload does before each gather
            kept[0]._take_amax(args[0])
        return kept if isinstance(result, tuple | list) else kept[0]

    def plain(self) -> Tensor:
        """The same, without hooks."""
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            return self.as_subclass(Tensor).detach()

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return self.plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict) -> MasterShard:
        copied = MasterShard(copy.deepcopy(self.plain(), memo))
        return copied if not isinstance(self, nn.Parameter) else nn.Parameter(copied, self.requires_grad)  # type: ignore[return-value]

    # --- amax --------------------------------------------------------------------------------------------------------

    def own_amax(self) -> Tensor:
        """Of this shard alone: float32 0-d."""
        return torch.ops.nvfp4.amax(self.plain(), -1)

    def keep_amax(self, amax: Tensor) -> None:
        """That of the whole, until this shard changes."""
        self._amax = self._state(), amax

    def _take_amax(self, source: MasterShard) -> None:
        """That of the source, of which this is a copy, if it is not out of date."""
        if source.dtype == self.dtype and source._amax is not None and source._amax[0] == source._state():
            self.keep_amax(source._amax[1])

    def _state(self) -> tuple:
        return self._writes[0], self.data_ptr(), optimizer_steps()

    def _whole_amax(self, axes: tuple[ShardedDim, ...]) -> Tensor:
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
    ) -> tuple[tuple[Tensor, ...], _Codes]:
        spec = _weight_spec(module, module)
        gather.check_shard(self.shape, outer_size, mesh.size(), module, spec.block_rows)
        if self.shape[0] % spec.block_rows:
            raise ValueError(
                f"the weight of {module} has {self.shape[0]} rows on each of {mesh.size()} ranks, no multiple of the "
                f"{spec.block_rows} rows of its blocks: choose another world size, or let FSDP2 gather it as it is"
            )
        _agree(module, mesh)
        codes = self._codes_for(spec, mp_policy.param_dtype or self.dtype, mesh, module)
        parts, rest = gather.pre_all_gather(codes, mesh, outer_size, module)
        return parts, _Codes(codes, rest)

    def _codes_for(self, spec: QuantizeSpec, dtype: torch.dtype, mesh: DeviceMesh, module: nn.Module) -> NVFP4Tensor:
        """This shard's codes: made for the gather of the forward, and kept for one more, that of the backward.

        There the kernels that make them would wait behind the products, and the gather behind them.
        """
        key = (*self._state(), spec, dtype)
        kept, self._codes = self._codes, None
        if kept is None or kept[0] != key:
            codes = self._quantized(spec, dtype, mesh, module)
            self._codes = key, codes
            return codes
        for part in (kept[1].qdata, kept[1].scale, kept[1].per_tensor_scale):
            if part.is_cuda:  # another stream may have made it
                part.record_stream(torch.cuda.current_stream(part.device))
        return kept[1]

    def _quantized(self, spec: QuantizeSpec, dtype: torch.dtype, mesh: DeviceMesh, module: nn.Module) -> NVFP4Tensor:
        sharding = getattr(module, "sharding", None)
        axes = (ShardedDim(mesh.get_local_rank(), mesh.size(), (mesh.get_group().group_name,)),)
        amax = self._whole_amax(axes if sharding is None else (*axes, *sharding.w))
        amax = amax.to(dtype).float()  # that of the weight in the dtype of the products, for rounding is monotonic
        qdata, scale, factor = torch.ops.nvfp4.quantize(self.plain().to(dtype), amax, None, spec.pack())
        return NVFP4Tensor._of_parts(qdata, scale, factor, self.shape[1], dtype, spec)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: _Codes,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        return gather.post_all_gather(metadata.shard, all_gather_outputs, metadata.rest, param_dtype, out)


_agreed: WeakKeyDictionary[nn.Module, Recipe] = WeakKeyDictionary()
"""What all ranks quantize a linear's weight by; not at the shard, of which CPU offload makes another in each gather."""


def _agree(module: nn.Module, mesh: DeviceMesh) -> None:
    """Once, before anything travels: a ValueError on all ranks where their recipes differ."""
    assert isinstance(module, NVFP4TrainingLinear)
    if mesh.size() > 1 and _agreed.get(module) != module.recipe:
        name = f"a linear of {module.in_features} inputs and {module.out_features} outputs"
        check_agreement("the recipe", {name: module.recipe}, mesh.get_group())
        _agreed[module] = module.recipe


def _count_writes(func: Op, args: Args, kwargs: Kwargs) -> None:
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written = args[i] if i < len(args) else kwargs.get(argument.name)
            for t in tree_leaves(written):
                if isinstance(t, MasterShard):
                    t._writes[0] += 1
                    t._codes = None
