"""What a call with one of our configs does to a model: check all weights, then quantize or observe each."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor, nn
from torchao.quantization.quantize_.common.quantization_step import QuantizationStep as Step
from torchao.quantization.transform_module import register_quantize_module_handler
from tqdm import tqdm

from nvfp4_tensor._compat.frames import warn_user
from nvfp4_tensor.matmul.backends import check_backend, check_installed
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.quantization import observed_experts
from nvfp4_tensor.quantization.callers import once_per_call, warn_of_merge
from nvfp4_tensor.quantization.config import NVFP4Config, NVFP4WeightOnlyConfig
from nvfp4_tensor.quantization.conv1d import as_linear
from nvfp4_tensor.quantization.experts import names_of_experts, stop_training
from nvfp4_tensor.quantization.linear import joined_linears, quantizable, set_weight, shared_parameters
from nvfp4_tensor.quantization.names import refused_by_name
from nvfp4_tensor.quantization.observer import InputStatistics, ObservedLinear, check_observable, check_observed
from nvfp4_tensor.quantization.shards import refuse_absent
from nvfp4_tensor.quantization.trained import dense_linear, trained_in_nvfp4, warn_of_training
from nvfp4_tensor.quantization.weights import WeightRef, dense_experts, shared_amax, with_static_amax
from nvfp4_tensor.tensor.arguments import stored_spec
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor


@register_quantize_module_handler(NVFP4WeightOnlyConfig)
@register_quantize_module_handler(NVFP4Config)
def _quantize_module(module: nn.Module, config: NVFP4WeightOnlyConfig) -> nn.Module:
    def start(model: nn.Module, chosen: list[nn.Module], is_all: bool) -> Conversion:
        experts = names_of_experts(model) if config.experts else ()
        conversion = Conversion(model, chosen, config, experts=experts, is_all=is_all)
        conversion.start(model)
        return conversion

    once_per_call(module, config, start).apply(module)
    return module


class Conversion:
    """The linears and experts of one call. Making it checks them all, and warns of what the call leaves out.

    Args:
        chosen: the modules of the call. With ``step="convert"``, those that were not prepared are left as they are.
        experts: names of the experts' weights.
        is_all: whether these are all modules of the call.
    """

    def __init__(
        self,
        model: nn.Module,
        chosen: Collection[nn.Module],
        config: NVFP4WeightOnlyConfig,
        *,
        experts: Collection[str] = (),
        is_all: bool = True,
    ) -> None:
        config._check_calibrated()
        self.config, self.spec = config, config.weight
        self.prepares, self.converts = (config.step == step for step in (Step.PREPARE, Step.CONVERT))
        self.linears = {each: None for each in chosen if not self.converts or isinstance(each, ObservedLinear)}
        self.names = {module: name for name, module in model.named_modules() if module in self.linears}
        self.joined = joined_linears(model, self.linears)
        found = list(dense_experts(model))
        self.experts = [each for each in found if each.name in experts]
        self.done: set[nn.Module] = set()
        self.amax: dict[nn.Module, Tensor] = {}
        self.bar = tqdm(disable=True)
        refuse_absent(model, {*self.linears, *(model.get_submodule(name.rpartition(".")[0]) for name in experts)})
        for linear in self.linears:
            with refused_by_name(self.names[linear]):
                self._check(linear)
        if self.converts:
            self._check_observed(model)
        self._find_ties(model)
        warn_of_merge()
        if is_all:
            warn_of_training(model, chosen, bool(experts))
            self._warn_of_codes()
            if not self.converts:  # those that were prepared were named then
                self._warn_of_adapters(model)
        if found and config.experts is None and not self.prepares and not experts:
            _warn_of_dense_experts(model, found)

    def start(self, model: nn.Module) -> None:
        """Observe or quantize the experts."""
        if self.experts:
            stop_training(model)
        if self.prepares:
            observed_experts.observe(self.experts, self._observed_spec)
            return
        while self.experts:
            weight = self.experts.pop(0)
            weight.set(weight.quantized(self.config, observed=[self.observed[weight.name]] if self.converts else ()))
            self.bar.update()
        observed_experts.finish(model)

    def run(self, model: nn.Module, *, progress: bool = False) -> None:
        """Observe or quantize the experts, and then the linears."""
        total = len(self.linears) + len(self.experts)
        with tqdm(total=total, desc="quantizing", unit="weight", disable=not progress) as self.bar:
            self.start(model)
            for module in self.linears:
                self.apply(module)
                self.bar.update()

    def apply(self, module: nn.Module) -> None:
        """Observe or quantize a linear and all that share its weight. Codes that trained are kept."""
        if module in self.done or module not in self.linears:
            return
        group = self.tied.get(module, [module])
        self.done.update(group)
        if not self.converts:
            dense_linear(module)
        if module in self.left_dense:
            if self.converts:
                module.stop_observing()  # type: ignore[operator]
        elif self.prepares:
            for each in group:
                ObservedLinear.observe(as_linear(dense_linear(each)), self._observed_spec)
        else:
            weight = nn.Parameter(self._quantized(module, group), requires_grad=False)
            for each in group:
                set_weight(each, weight)

    @property
    def _observed_spec(self) -> QuantizeSpec:
        return self.config.activation or self.spec

    # --- checks ------------------------------------------------------------------------------------------------------

    def _check(self, module: nn.Module) -> None:
        """Raise an error if the linear cannot be quantized, or observed in the prepare step."""
        if isinstance(module, ObservedLinear) and self.converts:
            self._check_same_transform(module)
        elif trained_in_nvfp4(module):
            self._check_codes(module)
        else:
            quantizable(module)
        if self.prepares:
            check_observable(module)
        if isinstance(self.config, NVFP4Config):  # before the first product
            backend, weight = self.config.fields["product_backend"], module.weight
            if weight.device.type == "cuda":  # type: ignore[union-attr]
                check_backend(backend, weight.device, weight.dtype)  # type: ignore[union-attr, arg-type]
            elif weight.device.type != "meta":  # type: ignore[union-attr]  # it may still move to another device
                check_installed(backend)

    def _check_same_transform(self, module: ObservedLinear) -> None:
        """Raise a ValueError for another transform than the observed one, under which the observed amax could clip."""
        signs = (module.hadamard_sign, self._observed_spec.hadamard_sign)
        prepared, now = ("None" if sign is None else f"{sign:#06x}" for sign in signs)
        if prepared != now:
            raise ValueError(
                f"{module} was prepared with hadamard_sign {prepared}, and its amax is not valid for {now}: convert "
                "with the specs of the prepare step, or prepare and calibrate the dense model again with these specs"
            )

    def _check_codes(self, module: nn.Module) -> None:
        """Raise a ValueError if the codes that a weight trained do not fit the config."""
        if self.config.weighted or self.spec.hadamard_sign != module.weight.spec.hadamard_sign:  # type: ignore[union-attr]
            raise ValueError(
                f"{module} trained in NVFP4 and keeps its codes, so that a scale search or a Hadamard transform of the "
                "weight is not possible: leave them out of the config, or give the linear dequantize() of its weight "
                "first"
            )

    def _check_observed(self, model: nn.Module) -> None:
        of_experts = observed_experts.observed_weights(model)
        if missing := [each.name for each in self.experts if each.name not in of_experts]:
            raise ValueError(
                f"{missing[0]} was not prepared, and nothing was converted: give experts=True in the prepare step too, "
                "or experts=False in this one"
            )
        self.observed: dict[str, InputStatistics] = {self.names[each] or str(each): each for each in self.linears}  # type: ignore[misc]
        self.observed |= {each.name: of_experts[each.name] for each in self.experts}
        check_observed(self.observed, self.config.weighted)

    def _find_ties(self, model: nn.Module) -> None:
        """Find the linears that share a weight, and warn of those that something else shares, which stay dense."""
        self.tied: dict[nn.Module, list[nn.Module]] = {}
        self.left_dense: set[nn.Module] = set()
        named: list[str] = []
        for holders in shared_parameters(model).values():
            modules = [module for _, module, name in holders if module in self.linears and name == "weight"]
            if len(modules) == len(holders):
                self.tied |= dict.fromkeys(modules, modules)
            elif modules:
                self.left_dense |= set(modules)
                named.append(" = ".join(f"{path}.{name}".lstrip(".") for path, _, name in holders))
        if named:
            warn_user(
                f"left dense, because something that is not quantized shares these weights: {', '.join(named)}. To "
                "quantize only the linear, give it a weight of its own first: linear.weight = "
                "nn.Parameter(linear.weight.detach().clone())"
            )

    # --- warnings ----------------------------------------------------------------------------------------------------

    def _warn_of_adapters(self, model: nn.Module) -> None:
        """Warn of adapters of peft that would train."""
        adapters = [
            name
            for name, module in model.named_modules()
            if "lora_" in name and module in self.linears and module.weight.requires_grad  # type: ignore[union-attr]
        ]
        if adapters:
            warn_user(
                f"quantize_ also quantizes {len(adapters)} matrices of adapters ({adapters[0]}, ...), which then do "
                "not train: quantize before peft.get_peft_model, or pass filter_fn=lambda module, name: "
                "isinstance(module, torch.nn.Linear) and 'lora_' not in name"
            )

    def _warn_of_codes(self) -> None:
        """Warn of weights that trained in NVFP4 by another spec than the config's, because they keep their codes."""
        spec = stored_spec(self.spec)
        other = [each for each in self.linears if trained_in_nvfp4(each) and each.weight.spec != spec]  # type: ignore[union-attr]
        if other:
            warn_user(
                f"{len(other)} weights trained in NVFP4 and keep their codes: the config's settings for weights have "
                "no effect on them"
            )

    # --- a linear ----------------------------------------------------------------------------------------------------

    def _quantized(self, module: nn.Module, group: Sequence[nn.Module]) -> NVFP4Tensor:
        """Return the weight of linears that share it, by what all of them observed."""
        observed = [each for each in group if isinstance(each, ObservedLinear)] if self.converts else []
        if trained_in_nvfp4(module):
            codes = module.weight.detach()  # type: ignore[operator]
            assert isinstance(codes, NVFP4Tensor)
            quantized = with_static_amax(codes._replace(**self.config.fields), self.config, observed)
        else:
            weight = WeightRef(f"{self.names[module]}.weight".lstrip("."), module, "weight", as_linear(module).weight)
            quantized = weight.quantized(self.config, amax=self._shared_amax(module), observed=observed)
        for each in observed:
            each.stop_observing()
        return quantized

    def _shared_amax(self, module: nn.Module) -> Tensor | None:
        """Return the largest amax of the weights that share a per-tensor scale with a module's; None if none does."""
        group, spec = self.joined.get(module), self.spec
        if group is None or spec.row_scaled or any(trained_in_nvfp4(each) for each in group):
            return None
        if module not in self.amax:
            self.amax |= dict.fromkeys(group, shared_amax([as_linear(each).weight.detach() for each in group], spec))
        return self.amax[module]


def _warn_of_dense_experts(model: nn.Module, left: Sequence[WeightRef]) -> None:
    """Warn of the experts of a model that a config does not mention."""
    share = sum(each.dense.numel() for each in left) / sum(parameter.numel() for parameter in model.parameters())
    warn_user(
        f"the experts stay dense, {share:.0%} of the model's weights ({left[0].name}, {len(left)} in all): "
        "experts=True in the config also quantizes them, experts=False silences this warning"
    )
