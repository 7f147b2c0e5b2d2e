"""Quantization-aware training of SmolLM2-135M for W4A4 with a Hugging Face Trainer.

    python tutorials/qat_smollm2.py                                        # 100 steps on a CPU, 7 core-seconds each
    python tutorials/qat_smollm2.py --device cuda --steps 1000 --batch 16

With torchao's QATConfig, the forward of every linear in the blocks computes the result of NVFP4Config; straight-through
gradients update float32 weights, and arithmetic is bfloat16 by autocast. The loss is the KL divergence from the dense
model, so that training reduces only the error of quantization. With next-token loss the model would also learn the
text, which lowers the perplexity too.

The model is trained on docstrings of Python's library and evaluated on 4,096 tokens of its help topics. Results of the
command above (CPython 3.11.7, 51,200 tokens of training, 2.9 GiB of memory):

    dense                     perplexity 13.128    269.0 MB
    W4A4, rounded             perplexity 20.283    116.9 MB
    W4A4, trained             perplexity 15.777    116.9 MB    63 % of the difference is recovered
"""

from __future__ import annotations

import argparse
import ast
import copy
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.quantization import quantize_
from torchao.quantization.qat import QATConfig

from nvfp4_tensor import NVFP4Config, NVFP4Tensor, model_size

try:
    from nvfp4_cli.demo.model import evaluation_tokens, gguf_path, load_model
    from nvfp4_tensor.testing.model_quality import perplexity

    gguf_path()
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
except (ImportError, FileNotFoundError) as missing:
    raise SystemExit(f"this tutorial needs the packages of the demo: {missing}") from None

SERVED = NVFP4Config()
"""The config for training and for the conversion."""
WINDOW = 1024  # of the evaluation, the same as in the demo so that results are comparable

# --- text ------------------------------------------------------------------------------------------------------------


def docstrings(folder: Path) -> Iterator[str]:
    """Return docstrings of at least 200 characters in a folder's .py files, except tests and installed packages."""
    for path in sorted(folder.rglob("*.py")):
        if {"site-packages", "test", "tests"} & set(path.relative_to(folder).parts):
            continue
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if len(text) >= 200:
                    yield text


def training_windows(tokenizer, length: int, count: int) -> list[dict[str, Tensor]]:
    """Return ``count`` windows of ``length`` tokens in a fixed random order, repeating the text if necessary."""
    texts = list(docstrings(Path(sysconfig.get_path("stdlib"))))
    ids = torch.cat([tokenizer(text + "\n\n", return_tensors="pt").input_ids[0] for text in texts])
    windows = ids[: len(ids) // length * length].view(-1, length)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": windows[order[i % len(windows)]]} for i in range(count)]


# --- training --------------------------------------------------------------------------------------------------------


class Distillation(Trainer):
    """A Trainer whose loss is KL(teacher || model) in nats per token."""

    def __init__(self, teacher: nn.Module, **arguments) -> None:
        super().__init__(**arguments)
        self.teacher = teacher.to(self.args.device)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        with torch.no_grad():
            expected = self.teacher(**inputs).logits.float().log_softmax(-1).flatten(0, 1)
        output = model(**inputs)
        loss = F.kl_div(
            output.logits.float().log_softmax(-1).flatten(0, 1), expected, log_target=True, reduction="batchmean"
        )
        return (loss, output) if return_outputs else loss


def train(dense: nn.Module, windows: list[dict[str, Tensor]], options: argparse.Namespace) -> nn.Module:
    """Return the trained float32 model, before conversion. The embedding, tied to the output layer, is not trained."""
    model = copy.deepcopy(dense).float()
    model.get_input_embeddings().requires_grad_(False)
    quantize_(model.model, QATConfig(SERVED, step="prepare"))
    arguments = TrainingArguments(
        output_dir=str(options.output),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        learning_rate=options.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=options.steps // 10,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        bf16=True,
        use_cpu=options.device == "cpu",
        logging_steps=max(options.steps // 20, 1),
        save_strategy="no",
        report_to="none",
        dataloader_pin_memory=False,
    )
    Distillation(teacher=dense, model=model, args=arguments, train_dataset=windows).train()
    return model.eval()


# --- serving ---------------------------------------------------------------------------------------------------------


def save(model: nn.Module, folder: Path) -> None:
    """Convert the model in place and save it for :func:`load`: W4A4 linears, everything else in bfloat16."""
    quantize_(model.model, QATConfig(SERVED, step="convert"))
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    cast = {parameter: parameter.detach().to(torch.bfloat16) for parameter in model.parameters()}
    state = {name: cast[parameter] for name, parameter in model.named_parameters(remove_duplicate=False)}
    torch.save(state, folder / "model.pt")  # saves the tied embedding once


def load(folder: Path) -> nn.Module:
    """Load the converted model in bfloat16 on the CPU."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig

    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    model.load_state_dict(torch.load(folder / "model.pt", weights_only=True), assign=True)
    model.tie_weights()
    return model.eval()


def codes(model: nn.Module) -> list[Tensor]:
    """Return the codes of all NVFP4 weights."""
    return [p.qdata.cpu() for p in model.parameters() if isinstance(p, NVFP4Tensor)]


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Return the perplexities of the dense, the quantized and the trained model."""
    options = parse(arguments)
    dense, tokenizer = load_model()
    tokens = evaluation_tokens(tokenizer, options.evaluate).to(options.device)
    result: dict[str, float] = {}

    def judge(name: str, model: nn.Module) -> None:
        result[name] = perplexity(model.to(options.device), tokens, min(WINDOW, options.evaluate))
        print(f"{name}: perplexity {result[name]:.3f}, {model_size(model)}", flush=True)

    judge("dense", dense)
    rounded = copy.deepcopy(dense)
    quantize_(rounded.model, SERVED)
    judge("W4A4, rounded", rounded)
    del rounded
    model = train(dense, training_windows(tokenizer, options.length, options.steps * options.batch), options)
    save(model, options.output)
    served = load(options.output)
    assert all(torch.equal(a, b) for a, b in zip(codes(served), codes(model), strict=True))
    judge("W4A4, trained", served)
    regained = (result["W4A4, rounded"] - result["W4A4, trained"]) / (result["W4A4, rounded"] - result["dense"])
    print(f"{100 * regained:.0f} % of the quantization error is recovered; the model is in {options.output}")
    assert regained > 0
    return result


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=2, help="windows per step (%(default)s)")
    parser.add_argument("--length", type=int, default=256, help="tokens per window (%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--evaluate", type=int, default=4096, help="tokens to evaluate on (%(default)s)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, default=Path("qat_smollm2_output"))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
