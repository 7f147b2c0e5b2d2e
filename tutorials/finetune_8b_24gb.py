"""Fine-tune all weights of a language model, not adapters, in the memory of one consumer GPU.

    python tutorials/finetune_8b_24gb.py --text FILE...                              # SmolLM2-135M, on a CPU
    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True \\
    python tutorials/finetune_8b_24gb.py --text FILE... --model FOLDER --device cuda # any Llama-shaped model
    python tutorials/finetune_8b_24gb.py --text FILE... --model FOLDER --plan        # what it would take, nothing else
    python tutorials/finetune_8b_24gb.py --text FILE... --resume                     # from the last checkpoint

Linears of the layers are stored in NVFP4, without master copies; AdamW's moments take four bits each; the optimizer
steps inside the backward, so that gradients do not pile up; layers are checkpointed; and the loss is computed in
chunks, so that logits never exist as a whole. A parameter of a linear takes 1.69 bytes with its optimizer's state,
where mixed precision takes 16. A plan of the memory that does not fit ends the run; on a GPU it holds with expandable
segments, which leave no fragments. A resumed run has the bits of one that was not interrupted.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from nvfp4_tensor import NVFP4Tensor, model_size, training

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


def plan_memory(model: nn.Module, tokens: int, loss_chunk: int, device: str) -> dict[str, int]:
    """Return the bytes at the peak by purpose, for a Llama-shaped model with quantized layers, also on "meta".

    Work is the larger of two phases: the loss (a chunk's logits and the gradient of the output layer), or the backward
    of a layer (what it saves, its intermediate gradients, gradient and values of a weight, and the gradient of an
    output layer that is tied to the embedding). torch's allocator reserved 5 % more than that on an H200.
    """
    config, size, head = model.config, model_size(model), model.get_output_embeddings().weight
    hidden, heads = config.hidden_size, config.num_attention_heads
    width = getattr(config, "head_dim", None) or hidden // heads
    saved = 16 * hidden + 4 * width * (heads + config.num_key_value_heads) + 12 * config.intermediate_size
    largest = max(p.numel() for p in model.parameters() if isinstance(p, NVFP4Tensor))
    tied = 2 * head.numel() if head is model.get_input_embeddings().weight else 0
    logits = min(loss_chunk, tokens) * config.vocab_size * 12  # bfloat16 and float32, values and gradients
    loss, layer = 2 * head.numel() + logits + 6 * tokens * hidden, tokens * saved + 4 * largest + tied
    plan = {"weights": size.total, "moments": size.moments, "work": max(loss, layer)}
    plan["layer inputs"] = 2 * tokens * hidden * config.num_hidden_layers
    plan["reserve"] = sum(plan.values()) // 20
    plan["CUDA"] = 600 << 20 if device == "cuda" else 0
    return {**plan, "total": sum(plan.values())}


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


def open_model(name: str | None, device: str = "cpu") -> tuple[nn.Module, Any]:
    """Return a model in bfloat16, without memory on "meta", and its tokenizer: SmolLM2 from the demo by default."""
    if name is None:
        from nvfp4_cli.demo.model import load_model

        return load_model()
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    with torch.device(device):
        if device == "meta":
            return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name), dtype=torch.bfloat16), None
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16), AutoTokenizer.from_pretrained(name)


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
    counts = ("steps", "batch", "length", "loss_chunk")
    for name in (*counts, "learning_rate", "warmup", "clip_norm", "memory", "checkpoint_every"):
        value, least = getattr(options, name), int(name in counts)
        if not value >= least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, not {value}")
    return options


def read(path: Path) -> str:
    """Return the text of a file, or end with what is wrong with it."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"{path} cannot be read as UTF-8 text: {error}") from None


def main(arguments: list[str] | None = None) -> list[float]:
    """Train with the options of the command line, and return the losses."""
    options = parse(arguments)
    settings = Settings(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Settings)})
    text = "\n".join(map(read, options.text))
    planned = quantize_layers(open_model(options.model, "meta")[0], "meta")
    plan = plan_memory(planned, settings.batch * settings.length, settings.loss_chunk, options.device)
    print("\n".join(f"{name:<14}{size / (1 << 30):>8.2f} GiB" for name, size in plan.items()))
    if options.plan:
        return []
    if plan["total"] > options.memory * (1 << 30):
        raise SystemExit(f"that exceeds {options.memory} GiB: shorten sequences or the batch, or take a smaller model")
    model, tokenizer = open_model(options.model)
    tokens = tokenizer(text, return_tensors="pt").input_ids[0]
    finetuner = Finetuner(model, tokens, settings, options.device)
    if options.resume:
        checkpoint = torch.load(options.output / "checkpoint.pt", map_location=options.device, weights_only=True)
        finetuner.load_state_dict(checkpoint)
    options.output.mkdir(parents=True, exist_ok=True)
    losses = list(train(finetuner, options.output, options.checkpoint_every))
    if options.device == "cuda":
        print(f"the most that torch reserved: {torch.cuda.max_memory_reserved() / (1 << 30):.2f} GiB")
    save_for_transformers(finetuner.model, options.output / "model")
    tokenizer.save_pretrained(options.output / "model")
    return losses


if __name__ == "__main__":
    main()
