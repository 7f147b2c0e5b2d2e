"""Fine-tune all weights of a language model, not adapters, in the memory of one consumer GPU.

    python tutorials/finetune_8b_24gb.py --text FILE...                              # SmolLM2-135M, on a CPU
    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True \\
    python tutorials/finetune_8b_24gb.py --text FILE... --model FOLDER --device cuda # any Llama-shaped model
    python tutorials/finetune_8b_24gb.py --text FILE... --model FOLDER --plan        # what it would take, nothing else
    python tutorials/finetune_8b_24gb.py --text FILE... --resume                     # from the last checkpoint

Linears of the layers are stored in NVFP4, without master copies; AdamW's moments take four bits each; the optimizer
steps inside the backward, so that gradients do not pile up; layers are checkpointed; and the loss is computed in
chunks, so that logits never exist as a whole. A parameter of a linear takes 1.69 bytes with its optimizer's state,
where mixed precision takes 16. A plan of the memory is printed before training starts, and a plan that does not fit
ends the run; on a GPU it holds with expandable segments, which leave no fragments. An interrupted and resumed run has
the bits of one that was not. The result is a bfloat16 model for transformers.
"""

from __future__ import annotations

import argparse
import dataclasses
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from nvfp4_tensor import NVFP4Tensor, training

# --- loss ------------------------------------------------------------------------------------------------------------


class ChunkedCrossEntropy(torch.autograd.Function):
    """The mean cross entropy of hidden (N, H) times weight (V, H) transposed, whose logits exist a chunk at a time.

    The forward computes both gradients too, so that no chunk is computed twice.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
        total = hidden.new_zeros((), dtype=torch.float32)
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        for h, t, d in zip(hidden.split(chunk), targets.split(chunk), d_hidden.split(chunk), strict=True):
            logits = (h @ weight.t()).float()
            total += F.cross_entropy(logits, t, reduction="sum")
            d_logits = logits.softmax(dim=-1)
            d_logits[torch.arange(len(t), device=t.device), t] -= 1
            d_logits = (d_logits / len(hidden)).to(hidden.dtype)
            torch.mm(d_logits, weight, out=d)
            d_weight.addmm_(d_logits.t(), h)
        ctx.save_for_backward(d_hidden, d_weight)
        return total / len(hidden)

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden.mul_(d_loss), d_weight.mul_(d_loss), None, None


# --- training --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that determines a run, except the text and the model."""

    steps: int = 100
    batch: int = 4
    length: int = 2048
    learning_rate: float = 1e-5
    warmup: int = 10
    clip_norm: float = 1.0
    loss_chunk: int = 512
    seed: int = 0


class Finetuner:
    """A model with NVFP4 weights, its optimizer, and the current step."""

    def __init__(self, model: nn.Module, tokens: Tensor, settings: Settings, device: str) -> None:
        """model: a transformers model in bfloat16; tokens: int64 (N,)."""
        if len(tokens) < settings.length + 2:
            raise ValueError(f"the text has {len(tokens)} tokens, and a sequence {settings.length}: give more text")
        self.settings, self.tokens = settings, tokens
        self.model = quantize_layers(model, device)
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.model.train()
        self.optimizer = training.NVFP4AdamW(
            self.model.parameters(), lr=settings.learning_rate, weight_decay=0.0, seed=settings.seed
        )
        self.optimizer.step_in_backward(clip_norm=settings.clip_norm)
        self.step = 0

    def _batch(self) -> Tensor:
        """Return (batch, length + 1) tokens that depend on the seed and the step alone."""
        settings = self.settings
        generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + self.step)
        starts = torch.randint(len(self.tokens) - settings.length, (settings.batch, 1), generator=generator)
        device = next(self.model.parameters()).device
        return self.tokens[starts + torch.arange(settings.length + 1)].to(device)

    def train_step(self) -> float:
        """Train one step, and return its loss in nats per token."""
        settings = self.settings
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate * min(1.0, (self.step + 1) / max(settings.warmup, 1))
        loss = self.loss(self._batch())
        loss.backward()
        self.optimizer.step()
        self.step += 1
        return loss.item()

    def loss(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of predicting each token of (batch, length + 1) from those before it."""
        hidden = self.model.model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
        head = self.model.get_output_embeddings().weight
        return ChunkedCrossEntropy.apply(hidden.flatten(0, 1), head, tokens[:, 1:].flatten(), self.settings.loss_chunk)

    def state_dict(self) -> dict:
        """Return everything that determines the next steps."""
        return {
            "settings": dataclasses.asdict(self.settings),
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict) -> None:
        """Resume from :meth:`state_dict`; raise a ValueError if the settings differ, except the number of steps."""
        mine = dataclasses.asdict(self.settings)
        differing = [name for name, value in state["settings"].items() if name != "steps" and mine[name] != value]
        if differing:
            raise ValueError(f"the checkpoint has other settings: {', '.join(differing)}")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]


def quantize_layers(model: nn.Module, device: str) -> nn.Module:
    """Store the linears of a model's layers in NVFP4, one layer at a time, and move the model to the device."""
    for layer in model.model.layers:
        layer.to(device)
        training.to_nvfp4_parameters(layer)
    return model.to(device)


def save_for_transformers(model: nn.Module, folder: Path) -> None:
    """Write the model in bfloat16, for from_pretrained."""
    state = {
        name: (value.dequantize() if isinstance(value, NVFP4Tensor) else value).to("cpu", torch.bfloat16)
        for name, value in model.state_dict().items()
    }
    model.save_pretrained(folder, state_dict=state)


def train(finetuner: Finetuner, folder: Path, checkpoint_every: int) -> Iterator[float]:
    """Train to the end, yield the losses, and write checkpoints."""
    steps = finetuner.settings.steps
    with tqdm(total=steps, initial=finetuner.step, unit="step", mininterval=1) as bar:
        while finetuner.step < steps:
            loss = finetuner.train_step()
            bar.set_postfix(loss=f"{loss:.3f}")
            bar.update()
            yield loss
            if checkpoint_every and (finetuner.step % checkpoint_every == 0 or finetuner.step == steps):
                partial = folder / "checkpoint.partial"
                torch.save(finetuner.state_dict(), partial)
                partial.replace(folder / "checkpoint.pt")


# --- command line ----------------------------------------------------------------------------------------------------


def open_model(name: str | None) -> tuple[nn.Module, Any]:
    """Return a model in bfloat16 on the CPU, and its tokenizer: SmolLM2 from the packages of the demo by default."""
    if name is None:
        from nvfp4_cli.demo.model import load_model

        return load_model()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16), AutoTokenizer.from_pretrained(name)


def planned(name: str | None, settings: Settings, device: str) -> training.MemoryPlan:
    """Return the plan of a model, which is made on the meta device for it."""
    if name is None:
        model = open_model(None)[0]
    else:
        from transformers import AutoConfig, AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name))
    tokens = settings.batch * settings.length
    return training.plan_finetuning(model, tokens, loss_chunk=settings.loss_chunk, on_cuda=device == "cuda")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; each field of Settings is an option."""
    parser = argparse.ArgumentParser(description="Fine-tune all weights of a language model in little memory.")
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="text files")
    parser.add_argument("--model", help="folder or name of a Llama-shaped transformers model")
    parser.add_argument("--output", type=Path, default=Path("finetune_output"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--memory", type=float, default=24.0, help="GiB that may be used")
    parser.add_argument("--checkpoint-every", type=int, default=50, help="steps between checkpoints; 0 for none")
    parser.add_argument("--plan", action="store_true", help="print the plan and end")
    parser.add_argument("--resume", action="store_true", help="resume from the checkpoint in --output")
    for field in dataclasses.fields(Settings):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    options = parser.parse_args(arguments)
    for name in ("steps", "batch", "length", "loss_chunk"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {getattr(options, name)}")
    for name in ("learning_rate", "warmup", "clip_norm", "memory", "checkpoint_every"):
        if not getattr(options, name) >= 0:
            parser.error(f"--{name.replace('_', '-')} must not be negative, not {getattr(options, name)}")
    return options


def read(path: Path) -> str:
    """Return the text of a file, or end with what is wrong with it."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SystemExit(f"{path} is not UTF-8 text (byte {error.start}): convert it, or leave it out") from None
    except OSError as error:
        raise SystemExit(f"{path} cannot be read: {error.strerror}") from None


def main(arguments: list[str] | None = None) -> list[float]:
    """Train with the options of the command line, and return the losses."""
    options = parse(arguments)
    settings = Settings(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Settings)})
    checkpoint = options.output / "checkpoint.pt"
    if options.resume and not checkpoint.exists():
        raise SystemExit(f"{checkpoint} does not exist: omit --resume to start a new run")
    text = "\n".join(map(read, options.text))
    plan = planned(options.model, settings, options.device)
    print(plan)
    if options.plan:
        return []
    try:
        plan.check(int(options.memory * (1 << 30)))
    except MemoryError as error:
        raise SystemExit(str(error)) from None
    model, tokenizer = open_model(options.model)
    tokens = tokenizer(text, return_tensors="pt").input_ids[0]
    finetuner = Finetuner(model, tokens, settings, options.device)
    if options.resume:
        try:
            state = torch.load(checkpoint, map_location=options.device, weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise SystemExit(f"{checkpoint} is not a whole checkpoint of this tutorial: {error}") from None
        finetuner.load_state_dict(state)
    options.output.mkdir(parents=True, exist_ok=True)
    losses = list(train(finetuner, options.output, options.checkpoint_every))
    if options.device == "cuda":
        print(f"the most that torch reserved: {torch.cuda.max_memory_reserved() / (1 << 30):.2f} GiB")
    save_for_transformers(finetuner.model, options.output / "model")
    tokenizer.save_pretrained(options.output / "model")
    return losses


if __name__ == "__main__":
    main()
