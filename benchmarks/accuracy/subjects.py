"""The models whose accuracy is measured, each with its texts, and what another model loses on these.

SmolLM2-135M of the demo is decoded Q4_1: each 32 of its weights have 16 values. The folder of
``benchmarks.accuracy.own_model`` is a model whose bfloat16 is its own.
"""

from __future__ import annotations

import functools
import json
import math
import resource
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from benchmarks.accuracy.texts import WINDOW, chat_tokens, docstring_tokens, header_tokens, library_docstrings
from benchmarks.harness import with_earlier as with_earlier
from nvfp4_cli.demo.model import evaluation_tokens, load_model
from nvfp4_tensor.checkpoints.models.opening import open_model, open_tokenizer


class SmolLM2:
    """It is judged on Python's help topics, headers, and chat text that the dense model wrote; learns docstrings."""

    name, label = "smollm2", "SmolLM2-135M-Instruct"
    text_names: tuple[str, ...] = ("help", "headers", "chat")
    written = 8_000_000
    """Tokens of its own that it is distilled on beside the docstrings."""

    def __init__(self) -> None:
        self.model, self.tokenizer = load_model()

    def texts(self, names: Iterable[str], count: int) -> dict[str, Tensor]:
        """Return ``count`` tokens, int64, of each evaluation text."""
        make = {"help": evaluation_tokens, "headers": header_tokens, "chat": functools.partial(chat_tokens, self.model)}
        return {name: make[name](self.tokenizer, count) for name in names}

    def calibration(self) -> Tensor:
        return self.tokenizer(library_docstrings(), return_tensors="pt").input_ids[0]

    def training(self, processes: int, limit: int, files: int | None) -> Tensor:
        return docstring_tokens(self.tokenizer, processes, limit, files)


class OwnModel:
    """It is judged on the parts of its texts that it was not trained on, and learns from those that it was."""

    written = 0

    def __init__(self, folder: Path) -> None:
        facts = json.loads((folder / "training.json").read_text())
        self.name, self.label = folder.name, f"{facts['parameters'] / 1e6:.0f}M parameters, {facts['steps']} steps"
        self.model, self.tokenizer = open_model(folder), open_tokenizer(folder)
        self._texts = torch.load(folder / "texts.pt", mmap=True)
        self.text_names = tuple(self._texts["evaluation"])

    def texts(self, names: Iterable[str], count: int) -> dict[str, Tensor]:
        """Return at most ``count`` tokens, int64, of each evaluation text."""
        return {name: self._texts["evaluation"][name][:count].long() for name in names}

    def calibration(self) -> Tensor:
        return self._texts["training"]

    def training(self, processes: int, limit: int, files: int | None) -> Tensor:
        return self._texts["training"][:limit].long()


def open_subject(folder: Path | None) -> SmolLM2 | OwnModel:
    """Return the model of a folder, or SmolLM2, on the CPU."""
    return SmolLM2() if folder is None else OwnModel(folder)


class Evaluation:
    """The dense model's logits and losses on each text, and what another model loses."""

    @torch.no_grad()
    def __init__(self, dense: nn.Module, texts: dict[str, Tensor]) -> None:
        device = next(dense.parameters()).device
        self.texts = {name: tokens.to(device).split(WINDOW) for name, tokens in texts.items()}
        self.logits = {name: [self._logits(dense, ids).cpu() for ids in w] for name, w in self.texts.items()}
        self.loss = {name: [cross_entropy(x.float(), ids[1:].cpu(), reduction="none") for x, ids in
                            zip(self.logits[name], self.texts[name], strict=True)] for name in texts}  # fmt: skip

    @staticmethod
    def _logits(model: Any, ids: Tensor) -> Tensor:
        logits: Tensor = model(ids.unsqueeze(0), use_cache=False).logits
        return logits[0, :-1]

    @torch.no_grad()
    def of(self, model: Any, windows: int | None = None) -> dict[str, dict[str, float]]:
        """Per text: increase and its standard error (paired), perplexity of both, KL(dense || model), agreement."""
        found = {}
        for name, every in self.texts.items():
            increase, loss, dense, divergence, agreeing = [], [], [], 0.0, 0
            for ids, exact, base in list(zip(every, self.logits[name], self.loss[name], strict=True))[:windows]:
                own, exact, base = self._logits(model, ids).float(), exact.to(ids.device).float(), base.to(ids.device)
                loss.append(cross_entropy(own, ids[1:], reduction="none"))
                increase.append(loss[-1] - base)
                dense.append(base)
                log_own, log_exact = log_softmax(own, -1), log_softmax(exact, -1)
                divergence += kl_div(log_own, log_exact, reduction="sum", log_target=True).item()
                agreeing += int((own.argmax(-1) == exact.argmax(-1)).sum())
            each, count = torch.cat(increase).double(), sum(map(len, increase))
            found[name] = {
                "increase": each.mean().item(), "standard_error": each.std().item() / count**0.5,
                "perplexity": math.exp(torch.cat(loss).double().mean()),
                "dense_perplexity": math.exp(torch.cat(dense).double().mean()),
                "kl": divergence / count, "agreement": agreeing / count,
            }  # fmt: skip
        return found


def text_heads(row: dict[str, Any]) -> list[str]:
    """The columns of :func:`text_cells`."""
    return [f"{name}: {what}" for name in row["texts"] for what in ("nats", "perplexity", "KL", "agreement")]


def text_cells(row: dict[str, Any]) -> list[str]:
    """What a row's texts say of it: increase, perplexity (and the dense model's), KL, agreement."""
    cells = []
    for each in row["texts"].values():
        cells += [f"{each['increase']:+.4f} +- {each['standard_error']:.4f}"]
        cells += [f"{each['perplexity']:.3f} ({each['dense_perplexity']:.3f})"]
        cells += [f"{each['kl']:.4f}", f"{each['agreement']:.1%}"]
    return cells


def peak_gb(device: torch.device) -> float:
    """The most memory so far: of the GPU since torch.cuda.reset_peak_memory_stats, or of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
