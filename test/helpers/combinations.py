"""Features as small objects, of which test_combinations.py makes every pair.

A *kind* quantizes a tiny transformers model, and what its linears compute then is what it is. A *use* takes a model of
a kind and gives it back: copied, stored, sharded, compiled, decoded. What the model computes must not change by it.
"""

import contextlib
import copy
import functools
import pickle
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torchao.quantization import quantize_
from torchao.quantization.qat import QATConfig

import nvfp4_tensor.integrations.transformers as hub
from helpers.files import saved
from helpers.texts import written
from nvfp4_tensor import NVFP4Config, NVFP4WeightOnlyConfig, calibrate, checkpoints, training
from nvfp4_tensor.generation import decode_natively, nvfp4_cache
from nvfp4_tensor.quantization import gptq

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
MIXTURE = {"hidden_size": 128, "num_hidden_layers": 1, "num_local_experts": 2, "num_experts_per_tok": 1}
LARGEST = 0.75
"""Of each weight, so that those that servers fuse have one per-tensor scale, and files keep their codes."""


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def dense(family: str = "Llama", seed: int = 0) -> Any:
    """Return a tiny dense model of a family in evaluation mode."""
    return copy.deepcopy(_dense(family, seed))


@functools.cache
def _dense(family: str, seed: int) -> Any:
    config = {**SIZES, **(MIXTURE if family == "Mixtral" else {})}
    with default_dtype(torch.float32), torch.no_grad():
        torch.manual_seed(seed)
        kind = getattr(transformers, f"{family}Config")(**config)
        model = transformers.AutoModelForCausalLM.from_config(kind, dtype=torch.bfloat16).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5).clamp_(-LARGEST, LARGEST)
                parameter.view(-1, parameter.shape[-1])[:: parameter.shape[-2], 0] = LARGEST
    model.generation_config.eos_token_id = None
    return model


def inner(module: nn.Module, name: str) -> bool:
    """Select the linears of all layers, not their adapters."""
    return isinstance(module, nn.Linear) and "lm_head" not in name and "lora_" not in name


Filter = Callable[[nn.Module, str], bool]


@dataclass(frozen=True)
class Kind:
    """A way to quantize a model.

    Attributes:
        apply: quantize the linears of a model that a filter selects.
        trains: it is for training: gradients of its parameters are compared, too, and its state dict belongs to a model
            of the same kind.
        makes: return its optimizer.
        tokens: the length of its text: FP8 products begin at 768 rows.
    """

    name: str
    apply: Callable[[Any, Filter], None]
    trains: bool = False
    makes: Callable[[Any], torch.optim.Optimizer] | None = None
    family: str = "Llama"
    tokens: int = 16

    def text(self) -> Tensor:
        return torch.randint(3, 96, (1, self.tokens), generator=torch.Generator().manual_seed(5))

    def model(self, chosen: Filter = inner, seed: int = 0, family: str | None = None) -> Any:
        """Return a dense model of which this kind has quantized the chosen linears."""
        return copy.deepcopy(_made(self.name, chosen, seed, family or self.family, torch.get_default_dtype()))


def _configured(make: Callable[[], Any]) -> Callable[[Any, Filter], None]:
    return lambda model, chosen: quantize_(model, make(), chosen)


def _static(model: Any, chosen: Filter) -> None:
    calibrate(model, [KINDS["w4a4 static"].text()], filter_fn=chosen, progress=False)


def _gptq(model: Any, chosen: Filter) -> None:
    batches = [torch.randint(3, 96, (2, 64), generator=torch.Generator().manual_seed(6))]
    gptq(model, batches, filter_fn=chosen, progress=False)


def _experts(model: Any, chosen: Filter) -> None:
    """Experts are quantized regardless of the filter."""
    quantize_(model, NVFP4WeightOnlyConfig(experts=True), chosen)


def add_adapters(model: Any, chosen: Filter) -> None:
    names = [name for name, module in model.named_modules() if chosen(module, name)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that merging needs a config
        peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=names, init_lora_weights=False), model)
    chance = torch.Generator().manual_seed(8)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, dtype=torch.float32, generator=chance).bfloat16() / 8


def _adapters_on_codes(model: Any, chosen: Filter) -> None:
    quantize_(model, NVFP4WeightOnlyConfig(), chosen)
    add_adapters(model, chosen)


def _to_parameters(model: Any, chosen: Filter) -> None:
    training.to_nvfp4_parameters(model, filter_fn=chosen)


def _trained(model: Any) -> list[nn.Parameter]:
    return [each for each in model.parameters() if each.requires_grad]


def _adamw(model: Any) -> torch.optim.Optimizer:
    return training.NVFP4AdamW(_trained(model), lr=1e-2)


def _wrapped_sgd(model: Any) -> torch.optim.Optimizer:
    return training.NVFP4Optimizer(_trained(model), torch.optim.SGD, lr=0.1, momentum=0.9)


KINDS = {
    kind.name: kind
    for kind in (
        Kind("weight-only", _configured(lambda: NVFP4WeightOnlyConfig(four_over_six=True))),
        Kind("w4a4", _configured(NVFP4Config)),
        Kind("w4a4 static", _static),
        Kind("row scales", _configured(lambda: NVFP4Config(row_scaled=True))),
        Kind("fp8", _configured(lambda: NVFP4WeightOnlyConfig(activations="fp8")), tokens=768),
        Kind("gptq", _gptq),
        Kind("experts", _experts, family="Mixtral"),
        Kind("training", _configured(training.NVFP4TrainingConfig), trains=True),
        Kind("qat", _configured(lambda: QATConfig(NVFP4Config(), step="prepare")), trains=True),
        Kind("lora", _adapters_on_codes, trains=True),
        Kind("nvfp4 adamw", _to_parameters, trains=True, makes=_adamw),
        Kind("nvfp4 optimizer", _to_parameters, trains=True, makes=_wrapped_sgd),
    )
}


@functools.cache
def _made(kind: str, chosen: Filter, seed: int, family: str, default: torch.dtype) -> Any:
    model = dense(family, seed)
    torch.manual_seed(7)
    KINDS[kind].apply(model, chosen)
    return model


@dataclass
class Subject:
    """A model of a kind in use.

    Attributes:
        mode: what is measured: its "logits", those of the "tokens" that it writes, or the results of its "linears".
        steps: how many its optimizer has taken. After two, what follows is for inference.
    """

    kind: Kind
    model: Any
    mode: str = "logits"
    optimizer: torch.optim.Optimizer | None = None
    contexts: list[Callable[[], contextlib.AbstractContextManager]] = field(default_factory=list)
    cache: Callable[[], Any] | None = None
    steps: int = 0
    rest: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @classmethod
    def of(cls, kind: Kind, mode: str = "logits") -> "Subject":
        subject = cls(kind, None, mode)
        subject.use(kind.model())
        return subject

    def use(self, model: Any) -> None:
        """Go on with a model, and a new optimizer of it."""
        self.model = model
        self.optimizer = self.kind.makes(model) if self.kind.makes else None

    def backward(self) -> None:
        torch.manual_seed(11)  # of recipes that round gradients at random
        self.model.train()
        self.model(self.kind.text(), labels=self.kind.text()).loss.backward()
        self.model.eval()

    def train(self, steps: int) -> None:
        """Take so many steps in all."""
        while self.steps < steps:
            self.steps += 1
            if self.optimizer is not None:
                self.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()

    def measure(self, along: Tensor | None = None) -> dict[str, Tensor]:
        """Return logits, and where the kind trains, gradients, after the second step of its optimizer."""
        found = {}
        with contextlib.ExitStack() as stack:
            for context in self.contexts:
                stack.enter_context(context())
            trains = self.kind.trains and self.steps < 2 and self.mode == "logits"
            self.train(2)
            if trains:
                self.backward()
                found = {f"d {n}": whole(p.grad) for n, p in self.model.named_parameters() if p.grad is not None}
                self.model.zero_grad()
            if self.mode == "linears":
                return results_of_linears(self.model, rows=self.kind.tokens)
            torch.manual_seed(12)
            with torch.no_grad():
                if self.mode == "tokens":
                    cache = {} if self.cache is None else {"past_key_values": self.cache()}
                    found["tokens"], found["logits"] = written(self.model, self.kind.text(), 5, along=along, **cache)
                else:
                    found["logits"] = self.model(self.kind.text()).logits
        return found


def results_of_linears(model: Any, chosen: Filter = inner, rows: int = 48) -> dict[str, Tensor]:
    """Return y, dx and the gradients of parameters of each linear, and of experts, each on inputs of its own."""
    found = {}
    for each in model.modules():
        if isinstance(each, FSDPModule):
            each.unshard()
    for name, module in model.named_modules():
        is_experts, is_adapted = name.endswith("mlp.experts"), hasattr(module, "base_layer")
        if not (is_experts or is_adapted or (chosen(module, name) and "base_layer" not in name)):
            continue
        chance = torch.Generator().manual_seed(len(name))
        width = module.hidden_dim if is_experts else module.in_features
        x = torch.randn(rows, width, generator=chance, dtype=torch.float32).bfloat16()
        x = x.to(model.dtype).requires_grad_()
        routes = torch.zeros((rows, 1), dtype=torch.int64), torch.ones((rows, 1), dtype=x.dtype)
        torch.manual_seed(13)  # of recipes that round at random
        y = module(x, *routes) if is_experts else module(x)
        dy = torch.randn(y.shape, generator=chance, dtype=torch.float32).bfloat16()
        parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
        grads = torch.autograd.grad(y, [x, *parameters.values()], dy.to(y.dtype))
        found[name] = y.detach().bfloat16()
        found |= {f"{name}: d {n}": g.bfloat16() for n, g in zip(["x", *parameters], grads, strict=True)}
    return found


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


# --- uses ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Use:
    """Something that one does with a model of a kind.

    Attributes:
        start: what is in force before the model is quantized.
        apply: change a subject.
        mode: of its subject: "tokens" if it has an effect on text that the model writes, "linears" if they are to be
            compared one by one on the same inputs, because other roundings between them differ.
        bound: of the relative error of logits; 0: the same bits.
    """

    name: str
    apply: Callable[[Subject], None] = lambda subject: None
    start: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    mode: str = "logits"
    bound: float = 0.0


def _native(subject: Subject) -> None:
    decode_natively(subject.model)


def _cached(subject: Subject) -> None:
    subject.cache = lambda: nvfp4_cache(subject.model.config, recent=4)


def _compile(subject: Subject) -> None:
    mlp = subject.model.model.layers[0].mlp
    up = getattr(mlp, "up_proj", mlp)
    module = mlp if type(up) is nn.Linear else up  # torch does not compile nn.Linear.compile() of torchao's tensors
    module.compile(backend="aot_eager", fullgraph=True)


def _export(subject: Subject) -> None:
    subject.train(2)
    layer, x = subject.model.model.layers[0], torch.randn(1, subject.kind.tokens, subject.model.config.hidden_size)
    shapes = ({1: torch.export.Dim.DYNAMIC},)
    with torch.no_grad():
        exported = torch.export.export(layer.mlp, (x.to(subject.model.dtype),), dynamic_shapes=shapes, strict=False)
    layer.mlp = exported.module()


def _skeleton(subject: Subject) -> None:
    """Replace the model by one with other values, and the optimizer by a new one."""
    kind = subject.kind
    subject.use(kind.model(seed=1) if kind.trains else dense(kind.family, seed=1))


def _torch_save(subject: Subject) -> None:
    subject.train(1)
    optimizer = subject.optimizer and subject.optimizer.state_dict()
    model, optimizer = saved(({name: whole(each) for name, each in subject.model.state_dict().items()}, optimizer))
    _skeleton(subject)
    subject.model.load_state_dict(model, assign=subject.kind.makes is None)
    if subject.optimizer is not None:
        subject.optimizer.load_state_dict(optimizer)


def _checkpoint(subject: Subject) -> None:
    subject.train(2)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        checkpoints.save(subject.model, path, mismatched_scales="keep", progress=False)
        subject.model = checkpoints.load(dense(subject.kind.family, seed=1), path, progress=False)


def _save_pretrained(subject: Subject) -> None:
    subject.train(2)
    with tempfile.TemporaryDirectory() as folder:
        if subject.kind.name not in ("training", "qat"):
            hub.attach_quantizer(subject.model)
        subject.model.save_pretrained(folder)
        subject.model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    subject.model.generation_config.eos_token_id = None


def _shard(subject: Subject) -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        subject.rest.callback(dist.destroy_process_group)
    mesh = init_device_mesh("cpu", (1,))
    for layer in subject.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(subject.model, mesh=mesh)
    subject.use(subject.model)


def _autocast(subject: Subject) -> None:
    subject.train(2)
    if subject.mode != "tokens":
        subject.model.float()
    subject.contexts.append(lambda: torch.autocast("cpu", torch.bfloat16))


def _copied(copy_of: Callable[[Any], Any]) -> Callable[[Subject], None]:
    def apply(subject: Subject) -> None:
        subject.train(1)
        old = subject.model, subject.optimizer
        subject.model, subject.optimizer = copy_of(old)
        with torch.no_grad():  # the copy does not change with what it was copied from
            for parameter in old[0].parameters():
                parameter.zero_()

    return apply


USES = {
    use.name: use
    for use in (
        Use("default bfloat16", start=lambda: default_dtype(torch.bfloat16)),
        Use("default float64", start=lambda: default_dtype(torch.float64)),
        Use("fsdp2", _shard),
        Use("autocast", _autocast, mode="linears"),
        Use("decode_natively", _native, mode="tokens", bound=0.05),
        Use("nvfp4_cache", _cached, mode="tokens", bound=0.25),
        Use("deepcopy", _copied(copy.deepcopy)),
        Use("pickle", _copied(lambda pair: pickle.loads(pickle.dumps(pair)))),
        Use("torch.save", _torch_save),
        Use("checkpoints", _checkpoint),
        Use("save_pretrained", _save_pretrained),
        Use("compile", _compile),
        Use("export", _export),
    )
}
