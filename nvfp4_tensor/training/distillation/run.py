"""distill(model, batches, config): train a quantized model towards the logits of the dense one."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from nvfp4_tensor.quantization.accuracy.gptq.run import digest
from nvfp4_tensor.quantization.accuracy.gptq.stages import call_model, in_eval_mode, list_of, logits_of
from nvfp4_tensor.quantization.calibration import calibrate
from nvfp4_tensor.quantization.callers import Filter
from nvfp4_tensor.quantization.config import NVFP4Config, NVFP4WeightOnlyConfig
from nvfp4_tensor.quantization.linear import shared_parameters
from nvfp4_tensor.quantization.trained import restored, to_dense
from nvfp4_tensor.quantization.whole_model import PlannedFilter, plan_model, quantize_model
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor
from nvfp4_tensor.training.distillation.captured_step import CapturedStep, Step, can_capture, compiled_blocks
from nvfp4_tensor.training.distillation.config import DistillConfig, Trains
from nvfp4_tensor.training.distillation.divergence import divergence
from nvfp4_tensor.training.distillation.masters import CodedMasters, Masters, is_coded
from nvfp4_tensor.training.weights.adamw import NVFP4AdamW
from nvfp4_tensor.training.weights.base import local_of, scale_groups

MEASURED_BATCHES = 4
"""Batches, the first ones, on which the loss before and after training is measured."""
_SAVE_SECONDS = 120
"""How often an unfinished run is written to its folder."""
_RECORDS, _HAS_HOOKS = "transformers.utils.output_capturing", "_output_capturing_hooks_installed"
"""The module of the hooks that record hidden states, and the attribute of a model that has them."""


class Progress(NamedTuple):
    """A finished step, for ``on_step`` of :func:`distill`.

    Attributes:
        step: steps so far.
        seconds: training time so far, with that of the runs that this one resumed.
        loss: the loss of the step, in nats per token.
        learning_rate: that of the step.
    """

    step: int
    seconds: float
    loss: float
    learning_rate: float


def distill(
    model: nn.Module,
    batches: Iterable[Any],
    config: DistillConfig | NVFP4WeightOnlyConfig | None = None,
    *,
    teacher: nn.Module | None = None,
    steps: int | None = None,
    minutes: float | None = None,
    filter_fn: Filter | None = None,
    folder: str | Path | None = None,
    on_step: Callable[[Progress], object] | None = None,
    progress: bool = True,
) -> nn.Module:
    """Quantize a model in place, and train it towards the dense model's logits (QAD, arXiv 2601.20088).

    The forward is that of the quantized model as it is deployed: the same codes, scales and products. Gradients pass
    the rounding unchanged, and AdamW updates float32 copies of the weights, which are rounded after each step. So the
    loss of the model after training, or of its checkpoint, is the loss that training had.

    A dense model is quantized to nearest first, as by ``quantize_model``. A model that is quantized already, by
    :func:`gptq` or :func:`calibrate` for instance, keeps its format and begins from its codes; it needs a ``teacher``.
    Routers, embeddings and output layers stay as they are.

    Memory, printed before the first step: the model, the dense weights, 16 bytes per weight that trains (float32 value,
    gradient and two moments; 1.7 and a gradient with ``nvfp4_masters``), and the activations of a batch. A transformers
    model with ``gradient_checkpointing_enable()`` recomputes these. ``torch.autocast`` around the call is in effect.
    Dropout is not.

    Args:
        model: a model that returns logits (..., classes), or an object with ``.logits``.
        batches: the inputs of the model, which are kept. Each is a tensor, a tuple of arguments or a mapping of keyword
            arguments, whose ``attention_mask`` selects the tokens that count. Training goes over them again as often
            as needed, in a new order.
        config: a :class:`DistillConfig`. An NVFP4Config or NVFP4WeightOnlyConfig is used as its base_config.
        teacher: the dense model, by default the given one before it is quantized.
        steps, minutes: the length of the run, whichever ends first; by default one pass over the batches.
        filter_fn: selects what is quantized, as in ``quantize_model``.
        folder: a folder from which an interrupted run with the same arguments resumes.
        on_step: called after each step with a :class:`Progress`. The model may run in it; its time does not count.
        progress: print memory and losses, and show a progress bar.

    Returns:
        The model, as quantized models are: its weights do not require gradients.

    Sharded models (FSDP2): quantize the model, shard it and the teacher, and call this on every rank with its own
    batches and ``steps``. An error leaves a sharded model partly trained; any other model is restored.

    Raises:
        TypeError: config, batches or what the model returns has another type.
        ValueError: no batches, a quantized model without a teacher, nothing to train, a folder of another run, or
            ``compile`` on several ranks.
        RuntimeError: the loss is not finite.

    Example::

        texts = [tokenizer(text, return_tensors="pt") for text in texts]
        distill(model, texts, NVFP4Config(), minutes=10)
        checkpoints.save(model, "SmolLM2-135M-W4A4", format="compressed-tensors")
    """
    if not isinstance(config, DistillConfig):
        config = DistillConfig(base_config=config)
    batches = list_of(batches, "distill needs inputs of the model")
    if config.compile and _has_ranks():
        raise ValueError("compile=True is for one process: compile the blocks of models yourself, before fully_shard")
    _reshard(model)
    length = _length(steps, minutes, -(-len(batches) // config.batches_per_step))
    coded = any(is_coded(each) for each in model.parameters())
    if coded and (teacher is None or config.base_config is not None or config.static):
        raise ValueError(
            f"{type(model).__name__} is quantized already: give the dense model as teacher=, and a config without "
            "base_config and static, because the codes and scales stay"
        )
    with torch.inference_mode(False), torch.enable_grad(), restored(model, only_on_error=True):
        if teacher is None:
            to_dense(model)
            teacher = _copy_of(model)
        if not coded:
            _quantize(model, batches, config, filter_fn)
        compiled = compiled_blocks((model, teacher)) if config.compile else contextlib.nullcontext()
        with _prepared(model, teacher, config) as parameters, compiled:
            run = _Run(model, teacher, parameters, batches, config, None if folder is None else Path(folder))
            run.train(length, math.inf if minutes is None else 60 * minutes, on_step, progress)
    return model


def _reshard(model: nn.Module) -> None:
    """Let a model have its shards as parameters: FSDP2 leaves the last ones gathered after a forward alone."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _has_ranks() -> bool:
    return torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


def _length(steps: int | None, minutes: float | None, one_pass: int) -> float:
    if steps is not None and (not isinstance(steps, int) or steps < 1):
        raise ValueError(f"steps is a whole number from 1 on, got {steps!r}")
    if minutes is None:
        return one_pass if steps is None else steps
    if not 0 < minutes < math.inf:
        raise ValueError(f"minutes must be above 0 and finite, got {minutes!r}")
    if _has_ranks():
        raise ValueError("ranks do not end after the same time: give steps instead of minutes")
    return math.inf if steps is None else steps


def _copy_of(model: nn.Module) -> nn.Module:
    """Return a copy of a model that shares the memory of its parameters, which quantizing it replaces."""
    memo = {id(each): nn.Parameter(each.detach(), requires_grad=False) for each in model.parameters()}
    return copy.deepcopy(model, memo)


def _quantize(model: nn.Module, batches: Sequence[Any], config: DistillConfig, filter_fn: Filter | None) -> None:
    base = NVFP4Config() if config.base_config is None else config.base_config
    if not config.static:
        quantize_model(model, base, filter_fn)
        return
    chosen = PlannedFilter(model, plan_model(model, filter_fn))
    if base.experts is None:
        base = dataclasses.replace(base, experts=bool(chosen.experts))
    linears = set(chosen.linears)
    with in_eval_mode(model):
        calibrate(
            model, batches[:MEASURED_BATCHES], base, filter_fn=lambda module, name: module in linears, progress=False
        )


@contextlib.contextmanager
def _prepared(model: nn.Module, teacher: nn.Module, config: DistillConfig) -> Iterator[dict[str, nn.Parameter]]:
    """Let only what trains require gradients, and both models run without dropout and caches; yield what trains."""
    required = {each: each.requires_grad for each in (*model.parameters(), *teacher.parameters())}
    names = {name for name, each in model.named_parameters() if each.requires_grad and not is_coded(each)}
    try:
        for each in required:
            each.requires_grad_(False)
        parameters = _trainable(model, config)
        with in_eval_mode(model), in_eval_mode(teacher), _settings((model, teacher), config):
            if any(getattr(each, "gradient_checkpointing", False) for each in model.modules()):
                # transformers recomputes only in training mode
                model.train()
                for module in model.modules():
                    if isinstance(module, nn.modules.dropout._DropoutNd):
                        module.eval()
            yield parameters
    finally:
        for each, was in required.items():
            each.requires_grad_(was)
        for name, each in model.named_parameters():
            each.requires_grad_(name in names)


def _trainable(model: nn.Module, config: DistillConfig) -> dict[str, nn.Parameter]:
    """Return the parameters that train, which replace those of the model, so that an error can restore them."""
    adapters = config.trains == Trains.ADAPTERS
    chosen = {
        name: each
        for name, each in model.named_parameters()
        if ("lora_" in name if adapters else is_coded(each) or each.dim() == 1)
        and (each.is_floating_point() or is_coded(each))
    }
    if not chosen:
        what = "has no adapters (lora_)" if adapters else "has no weights in NVFP4"
        raise ValueError(f"nothing to train: {type(model).__name__} {what}")
    holders = shared_parameters(model)
    for name, each in list(chosen.items()):
        if not isinstance(each, DTensor):
            chosen[name] = nn.Parameter(each.detach().clone(), requires_grad=False)
            path, _, attribute = name.rpartition(".")
            for _, module, own in holders.get(id(each), [(path, model.get_submodule(path), attribute)]):
                setattr(module, own, chosen[name])
        chosen[name].requires_grad_()
    return chosen


@contextlib.contextmanager
def _settings(models: Sequence[nn.Module], config: DistillConfig) -> Iterator[None]:
    """Set transformers' configs to no cache, and to hidden states if the loss has them; restore them afterwards.

    transformers records hidden states by hooks, which it leaves on the modules: they are removed.
    """
    settings = {"use_cache": False, **({"output_hidden_states": True} if config.hidden else {})}
    found = {id(own): own for each in models if (own := getattr(each, "config", None)) is not None}
    if config.hidden and not found:
        raise TypeError("hidden compares the hidden states of transformers models: leave it out of the config")
    before = [(own, name, getattr(own, name)) for own in found.values() for name in settings if hasattr(own, name)]
    hooks = {each: set(each._forward_hooks) for model in models for each in model.modules()}
    without = [each for each in hooks if not getattr(each, _HAS_HOOKS, False)]
    try:
        for own, name, _ in before:
            setattr(own, name, settings[name])
        yield
    finally:
        for own, name, value in before:
            setattr(own, name, value)
        for each, kept in hooks.items():
            for key, hook in list(each._forward_hooks.items()):
                if key not in kept and hook.__module__ == _RECORDS:
                    del each._forward_hooks[key]
        for each in without:
            each.__dict__.pop(_HAS_HOOKS, None)


def _settings_of(
    model: nn.Module, teacher: nn.Module, trained: Iterable[str], batches: Sequence[Any], config: DistillConfig
) -> dict[str, str]:
    """Return what a run that goes on in a folder must have in common with it, before the first step."""
    _reshard(teacher)
    own = (each for each in model.parameters() if not isinstance(each, DTensor))  # an error leaves shards trained
    both = (local_of(each.detach()) for each in (*own, *teacher.parameters()))
    # Static scales of activations are left out: they are the device's.
    weights = ([t.qdata, t.scale, t.per_tensor_scale] if isinstance(t, NVFP4Tensor) else t for t in both)
    return {
        "config": str(config), "parameters": str(list(trained)), "weights": digest(weights), "batches": digest(batches),
    }  # fmt: skip


class _Run:
    """The state of one call of distill, which a folder keeps."""

    def __init__(
        self,
        model: nn.Module,
        teacher: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        batches: Sequence[Any],
        config: DistillConfig,
        folder: Path | None,
    ) -> None:
        self.model, self.teacher, self.batches, self.config, self.folder = model, teacher, batches, config, folder
        self.step, self.before, self.is_whole = 0, 0.0, True
        self._settings = {} if folder is None else _settings_of(model, teacher, parameters, batches, config)
        self._update: Step = self._update_by
        decay, betas = config.weight_decay, config.betas
        options: dict[str, Any] = {"lr": config.learning_rate, "betas": betas, "weight_decay": decay}
        coded = {name: each for name, each in parameters.items() if is_coded(each)}
        groups = list(scale_groups(model, coded))
        if config.nvfp4_masters:
            self.masters: Masters = CodedMasters(parameters, {}, groups)
            self.optimizer: torch.optim.Optimizer = NVFP4AdamW(parameters.values(), seed=config.seed, **options)
        else:
            self.masters = Masters(parameters, dict(teacher.named_parameters()), groups)
            if can_capture((model, teacher)):
                device = next(model.parameters()).device
                self._update = CapturedStep(self._update_by, device, self.masters.count_writes)
                rate = torch.tensor(config.learning_rate, dtype=torch.float32, device=device)
                options |= {"lr": rate, "capturable": True, "fused": True}
            self.optimizer = torch.optim.AdamW(self.masters.values.values(), **options)

    # --- training ---

    def train(self, steps: float, seconds: float, on_step: Callable[[Progress], object] | None, progress: bool) -> None:
        self._load()
        first = self.measure()
        if progress:
            tqdm.write(self.memory(), file=sys.stderr)
        start = saved = time.monotonic()
        total = None if steps == math.inf else int(steps)
        try:
            with tqdm(total=total, initial=self.step, desc="distilling", unit="step", disable=not progress) as bar:
                while True:
                    elapsed = self.before + time.monotonic() - start
                    if self.step >= steps or elapsed >= seconds:
                        break
                    rate = self._set_rate(max(self.step / steps, elapsed / seconds), max(1 / steps, 1e-3))
                    loss = self._take_step()
                    bar.set_postfix_str(f"loss {loss:.4f}", refresh=False)
                    bar.update()
                    if on_step is not None:
                        called = time.monotonic()
                        on_step(Progress(self.step, self.before + called - start, loss, rate))
                        start += time.monotonic() - called
                    if self.folder is not None and time.monotonic() - saved > _SAVE_SECONDS:
                        self._save(self.before + time.monotonic() - start)
                        saved = time.monotonic()
        finally:
            if self.is_whole:  # a part of an update would be repeated; the folder keeps what was saved before
                self._save(self.before + time.monotonic() - start)
        trained = self.measure()
        deployed = self._reload()
        if progress:
            tqdm.write(
                f"loss {first:.4f} before training, {trained:.4f} after {self.step} steps, {deployed:.4f} after "
                f"reloading (first {len(self.batches[:MEASURED_BATCHES])} batches, nats per token)",
                file=sys.stderr,
            )

    def _set_rate(self, done: float, one: float) -> float:
        """Set the learning rate after the part ``done`` of the run, of which a step is ``one``, and return it."""
        rise = min((done + one) / self.config.warmup, 1.0) if self.config.warmup else 1.0
        rate = self.config.learning_rate * rise * 0.5 * (1 + math.cos(math.pi * done))
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        return rate

    def _take_step(self) -> float:
        count = self.config.batches_per_step
        found = self._update([self._batch(self.step * count + i) for i in range(count)])
        self.step += 1
        self.is_whole = True
        loss = found.item()
        if not math.isfinite(loss):
            self.folder = None  # which keeps what was finite
            raise RuntimeError(
                f"the loss of step {self.step - 1} is {loss}: look for NaN in the batches and the dense model, or "
                f"lower learning_rate ({self.config.learning_rate:g})"
            )
        return loss

    def _update_by(self, batches: Sequence[Any]) -> Tensor:
        """Update the model by the gradients of batches, and return their loss, from the device alone."""
        for each in (*self.masters.parameters.values(), *self.masters.values.values()):
            each.grad = None  # that of a capture that failed has no values
        losses = []
        for batch in batches:
            part = self.loss(batch) / len(batches)
            part.backward()  # type: ignore[no-untyped-call]
            self.masters.take_gradients()
            losses.append(part.detach())
        self.is_whole = False  # until the step is counted
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.masters.write()
        torch.clear_autocast_cache()  # which would keep casts of what was written
        return torch.stack(losses).sum()

    def _batch(self, index: int) -> Any:
        """Return the batch of an index: each pass over the batches has an order of its own."""
        turn, place = divmod(index, len(self.batches))
        generator = torch.Generator().manual_seed(self.config.seed + turn)
        return self.batches[int(torch.randperm(len(self.batches), generator=generator, device="cpu")[place])]

    # --- the loss ---

    def loss(self, batch: Any) -> Tensor:
        """Return the loss of a batch, in nats per token."""
        mask = None
        if isinstance(batch, Mapping):
            mask = batch.get("attention_mask")
            batch = {name: value for name, value in batch.items() if name != "labels"}
        with torch.no_grad():
            target = call_model(self.teacher, batch)
        output = call_model(self.model, batch)
        logits, exact = logits_of(output, self.model, "distill"), logits_of(target, self.teacher, "distill")
        mask = mask if mask is not None and mask.shape == logits.shape[:-1] else None
        compiled = self.config.compile and torch.is_grad_enabled()
        loss = divergence(logits, exact, mask, reverse=self.config.reverse, compiled=compiled)
        if not self.config.hidden:
            return loss
        pairs = zip(output.hidden_states[1:], target.hidden_states[1:], strict=True)
        errors = [(a.float() - b.float()).square().sum() / b.float().square().sum() for a, b in pairs]
        return loss + self.config.hidden * torch.stack(errors).mean()

    @torch.no_grad()
    def measure(self) -> float:
        """Return the mean loss of the first batches, not compiled."""
        with torch.compiler.set_stance("force_eager"):
            losses = [self.loss(batch) for batch in self.batches[:MEASURED_BATCHES]]
        loss: float = torch.stack(losses).mean().item()
        _reshard(self.model)
        return loss

    def _reload(self) -> float:
        """Return the loss of the model with the weights of its state dict, after a round trip through a file."""
        for parameter in self.masters.parameters.values():
            parameter.requires_grad_(False)
        if not any(isinstance(each, DTensor) for each in self.masters.parameters.values()):
            file = io.BytesIO()
            torch.save(self.model.state_dict(), file)
            file.seek(0)
            self.model.load_state_dict(torch.load(file, weights_only=True))
        return self.measure()

    def memory(self) -> str:
        """Return a line: the bytes that training takes beside the model."""
        count = sum(each.numel() for each in self.masters.values.values())
        masters, gradients, moments = (count * size / 1e9 for size in self.masters.bytes_per_element)
        dense = sum(each.nbytes for each in self.teacher.parameters()) / 1e9
        return (
            f"distilling {len(self.masters.values)} parameters with {count / 1e6:.1f} M elements: masters "
            f"{masters:.2f} GB, gradients {gradients:.2f} GB, moments {moments:.2f} GB, teacher {dense:.2f} GB, "
            f"{masters + gradients + moments + dense:.2f} GB in all beside the model, and the activations of a batch"
        )

    # --- the folder ---

    def _path(self) -> Path:
        assert self.folder is not None
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return self.folder / f"distill_{rank}.pt"

    def _save(self, seconds: float) -> None:
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {
            "settings": self._settings, "step": self.step, "seconds": seconds,
            "masters": self.masters.state_dict(), "optimizer": self.optimizer.state_dict(),
        }  # fmt: skip
        torch.save(state, self._path().with_suffix(".part"))
        self._path().with_suffix(".part").replace(self._path())

    def _load(self) -> None:
        if self.folder is None or not self._path().exists():
            return
        state = torch.load(self._path(), weights_only=True, map_location="cpu")
        if differs := [name for name, value in self._settings.items() if state["settings"].get(name) != value]:
            raise ValueError(
                f"{self.folder} has a run with other {', '.join(differs)}: resume with the same ones, or give another "
                "folder"
            )
        self.step, self.before = state["step"], state["seconds"]
        self.masters.load_state_dict(state["masters"])
        groups = [{name: group[name] for name in group if name != "params"} for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, options in zip(self.optimizer.param_groups, groups, strict=True):
            group.update(options)  # those of this device
