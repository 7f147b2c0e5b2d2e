"""Held-out perplexity of SmolLM2-135M after a fine-tuning on docstrings: all weights in NVFP4, AdamW, QLoRA.

    python -m benchmarks.accuracy.finetuning_quality --pack FILE        # needs the demo's packages
    python -m benchmarks.accuracy.finetuning_quality --file FILE --out FOLDER         # a minute and a half on an H200
    python -m benchmarks.accuracy.finetuning_quality --file FILE --device cpu --steps 2 --batch 1 --windows 2

The contenders start from the same weights and see the same batches:

- ``adamw``: float32 weights and moments, bfloat16 arithmetic by autocast. Beside it, the same model with the linears
  of its layers rounded to NVFP4 afterwards.
- ``nvfp4``: what tutorials/finetune_8b_24gb.py does: linears of the layers in NVFP4 without master copies, the rest in
  bfloat16, NVFP4AdamW.
- ``qlora``: frozen linears in NVFP4, with low-rank adapters (r = 16) of each, in float32.
- ``moments``: bfloat16 weights and NVFP4AdamW: what moments in four bits cost.
- ``masters``: ``adamw``, but products take the linears' weights rounded to NVFP4 (recipe ``weight_only``): what the
  format costs.
- ``rounded_masters``: ``masters`` that start from weights rounded to NVFP4, as those of ``nvfp4`` do: what the first
  rounding loses.

Each trains once with each of its learning rates; the one with the lowest loss on the development text counts. Files of
the packages are split into training, development and test by a checksum of their names.

``--pack`` makes one file of less than 55 MB: weights as integers in steps of 0.36 standard deviations of their row
(a relative error of 0.104; rounding to NVFP4 has 0.095), the token embedding of the tokens that the texts use, and the
texts. So perplexities are over this smaller vocabulary, and are no figures of SmolLM2 itself.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import io
import json
import lzma
import math
import sysconfig
import time
import zipfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness import at_least, commit, record, result_path, save, table
from nvfp4_tensor import NVFP4WeightOnlyConfig, QuantizeSpec, quantize, training

PACKAGES = ("torch", "transformers", "numpy", "torchao")
SPLITS = {"development": 0, "test": 1}
"""Remainders modulo 40 of the checksums of files; those up to :data:`LAST` are for training."""
LAST = 24
STEP = 0.36
RATES = {
    "nvfp4": (2e-4, 4e-4, 8e-4, 1.6e-3),
    "adamw": (1e-4, 2e-4, 4e-4, 8e-4),
    "qlora": (1e-3, 2e-3, 4e-3, 8e-3),
    "moments": (2e-4, 4e-4, 6e-4, 8e-4),
    "masters": (2e-4, 4e-4, 8e-4, 1.6e-3),
    "rounded_masters": (2e-4, 4e-4, 8e-4, 1.6e-3),
}
RANK = 16

# --- the file ---------------------------------------------------------------------------------------------------------


def _docstrings(folder: Path) -> Iterator[tuple[str, str]]:
    """Return (file, text) of docstrings of at least 200 characters, except of tests and installed packages."""
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).parts
        if {"site-packages", "test", "tests"} & set(parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if len(text) >= 200:
                    yield "/".join(parts), text


def _compressed(array: np.ndarray) -> bytes:
    """Return bytes in Huffman codes: the numbers are independent, so there are no repetitions to look for."""
    coder = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS, 9, zlib.Z_HUFFMAN_ONLY)
    return coder.compress(array.tobytes()) + coder.flush()


def pack(path: Path, limit: int = 1_200_000) -> None:
    """Write weights and texts of at most ``limit`` tokens to a file."""
    from nvfp4_cli.demo.model import load_model

    model, tokenizer = load_model()
    folders = [Path(sysconfig.get_path("stdlib"))]
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.origin is not None, f"{package} is not installed"
        folders.append(Path(spec.origin).parent)
    pieces: dict[str, list[Tensor]] = {"training": [], "development": [], "test": []}
    seen: set[str] = set()
    for folder in folders:
        for name, text in _docstrings(folder):
            check = zlib.crc32(f"{folder.name}/{name}".encode()) % 40
            if text in seen or check > LAST:  # torch's and transformers' functions share many
                continue
            seen.add(text)
            split = next((split for split, value in SPLITS.items() if value == check), "training")
            pieces[split].append(tokenizer(text + "\n\n", return_tensors="pt").input_ids[0])
    texts = {split: torch.cat(parts) for split, parts in pieces.items()}
    texts["training"] = texts["training"][:limit]
    used = torch.cat(list(texts.values())).unique()
    renumbered = torch.full((int(used.max()) + 1,), -1, dtype=torch.long)
    renumbered[used] = torch.arange(len(used))
    config = {
        name: getattr(model.config, name)
        for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                     "num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "rope_parameters",
                     "rope_theta")
        if hasattr(model.config, name)
    }  # fmt: skip
    config = {**config, "vocab_size": len(used), "tie_word_embeddings": True}
    sizes = {}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
        for name, p in model.state_dict().items():
            if name == "lm_head.weight":
                continue
            value = p.float()
            if name == "model.embed_tokens.weight":
                value = value[used]
            sizes[name] = list(value.shape)
            if value.dim() == 1:
                file.writestr(name, value.numpy().tobytes())
                continue
            step = (STEP * value.square().mean(dim=1, keepdim=True).sqrt()).half()
            codes = (value / step.float()).round().clamp(-127, 127).to(torch.int8)
            file.writestr(name, _compressed(codes.numpy()))
            file.writestr(f"{name}.step", step.numpy().tobytes())
        for split, tokens in texts.items():
            file.writestr(f"text.{split}", lzma.compress(renumbered[tokens].numpy().astype(np.uint16).tobytes()))
        file.writestr("about.json", json.dumps({"config": config, "sizes": sizes}))
    counts = {split: len(tokens) for split, tokens in texts.items()}
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB, {len(used)} tokens in the vocabulary, texts {counts}")


def unpack(path: Path) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """Return the config, the state dict in bfloat16, and the texts, int64, of a file."""
    data = io.BytesIO(path.read_bytes())
    with zipfile.ZipFile(data) as file:
        parts = {name: file.read(name) for name in file.namelist()}
    about = json.loads(parts["about.json"])

    def weight(item: tuple[str, list[int]]) -> tuple[str, Tensor]:
        name, shape = item
        if len(shape) == 1:
            return name, torch.frombuffer(bytearray(parts[name]), dtype=torch.float32).bfloat16()
        codes = torch.frombuffer(bytearray(zlib.decompress(parts[name])), dtype=torch.int8).view(shape)
        step = torch.frombuffer(bytearray(parts[f"{name}.step"]), dtype=torch.float16).view(-1, 1)
        return name, (codes.float() * step.float()).bfloat16()

    with ThreadPoolExecutor(8) as pool:
        state = dict(pool.map(weight, about["sizes"].items()))
    texts = {}
    for name, part in parts.items():
        if name.startswith("text."):
            numbers = np.frombuffer(lzma.decompress(part), dtype=np.uint16).astype(np.int64)
            texts[name.removeprefix("text.")] = torch.from_numpy(numbers)
    return about["config"], state, texts


# --- training ---------------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen linear with a low-rank adapter, as in QLoRA: y = x w^T + 2 (x a^T) b^T."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        device = linear.weight.device
        self.a = nn.Parameter(torch.randn(RANK, linear.in_features, device=device) / math.sqrt(linear.in_features))
        self.b = nn.Parameter(torch.zeros(linear.out_features, RANK, device=device))

    def forward(self, x: Tensor) -> Tensor:
        low = F.linear(F.linear(x, self.a.to(x.dtype)), self.b.to(x.dtype))
        return self.linear(x) + 2 * low


def prepare(model: nn.Module, kind: str, rate: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model (given in bfloat16) as a contender trains it, and its optimizer."""
    from torchao.quantization import quantize_

    if kind == "nvfp4":
        training.to_nvfp4_parameters(model.model.layers)
        return model, training.NVFP4AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    if kind == "moments":
        return model, training.NVFP4AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    if kind in ("adamw", "masters", "rounded_masters"):
        if kind == "rounded_masters":
            round_linears(model)
        model.float()
        if kind != "adamw":
            quantize_(model.model.layers, training.NVFP4TrainingConfig("weight_only"))
        return model, torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0, fused=True)
    model.requires_grad_(False)
    torch.manual_seed(0)
    quantize_(model.model.layers, NVFP4WeightOnlyConfig())
    for layer in model.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, Adapted(child))
    adapters = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.AdamW(adapters, lr=rate, weight_decay=0.0, fused=True)


@torch.no_grad()
def round_linears(model: nn.Module) -> None:
    """Round the weights of the layers' linears to NVFP4; they stay dense."""
    for module in model.model.layers.modules():
        if isinstance(module, nn.Linear):
            module.weight.copy_(quantize(module.weight.bfloat16(), QuantizeSpec()).dequantize(module.weight.dtype))


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean loss of windows (batch, length + 1)."""
    with torch.autocast(windows.device.type, torch.bfloat16):
        logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: nn.Module, text: Tensor, options: argparse.Namespace) -> float:
    """Return the loss of a text in nats per token, in windows without overlap."""
    length = options.length
    count = min((len(text) - 1) // length, options.windows)
    windows = text[: count * length + 1].unfold(0, length + 1, length)
    losses = [loss_of(model, part.to(options.device)) * len(part) for part in windows.split(16)]
    return torch.stack(losses).sum().item() / len(windows)


def train_one(kind: str, rate: float, packed: Any, options: argparse.Namespace) -> dict:
    """Train a contender with a learning rate, and return its losses."""
    start = time.perf_counter()
    config, state, texts = packed
    with torch.device(options.device):
        model = LlamaForCausalLM(LlamaConfig(**config)).bfloat16()
    model.load_state_dict({**state, "lm_head.weight": state["model.embed_tokens.weight"]})
    model, optimizer = prepare(model, kind, rate)
    model.eval()
    row: dict[str, Any] = {"kind": kind, "rate": rate, "test_before": held_out_loss(model, texts["test"], options)}
    text, warmup = texts["training"], max(options.steps // 10, 1)
    generator = torch.Generator().manual_seed(0)
    for step in range(options.steps):
        done = max(step - warmup, 0) / max(options.steps - warmup, 1)
        decay = min((step + 1) / warmup, 1.0) * (0.55 + 0.45 * math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = rate * decay
        starts = torch.randint(len(text) - options.length, (options.batch, 1), generator=generator)
        windows = text[starts + torch.arange(options.length + 1)].to(options.device)
        loss_of(model, windows).backward()
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    row["development"] = held_out_loss(model, texts["development"], options)
    row["test"] = held_out_loss(model, texts["test"], options)
    if kind == "adamw":
        round_linears(model)
        row["test_rounded"] = held_out_loss(model, texts["test"], options)
    return {**row, "seconds": time.perf_counter() - start}


def _work(queue: Any, results: Any, packed: Any, options: argparse.Namespace) -> None:
    torch.set_num_threads(1 if options.device == "cuda" else torch.get_num_threads())
    while (job := queue.get()) is not None:
        try:
            results.put(train_one(*job, packed, options))
        except Exception as error:  # one contender's error does not stop the others
            results.put({"kind": job[0], "rate": job[1], "error": f"{type(error).__name__}: {error}"})
    results.put(None)


def rows_of(runs: list[dict]) -> list[list[str]]:
    """Return the table's rows: each contender with the learning rate of its lowest development loss."""
    best = {}
    for run in sorted(runs, key=lambda run: run["development"], reverse=True):
        best[run["kind"]] = run
    rows = []
    for kind, run in best.items():
        rates = sorted(other["rate"] for other in runs if other["kind"] == kind)
        at_end = len(rates) > 1 and run["rate"] in (rates[0], rates[-1])
        rate = f"{run['rate']:.2g}" + (" (the end of its range)" if at_end else "")
        results = {kind: run["test"]}
        if "test_rounded" in run:
            results[f"{kind}, rounded afterwards"] = run["test_rounded"]
        for name, loss in results.items():
            more = f"{100 * (math.exp(loss - best['adamw']['test']) - 1):+.2f} %" if "adamw" in best else ""
            rows.append([name, rate, f"{math.exp(run['test_before']):.3f}", f"{math.exp(loss):.3f}", more])
    return rows


def study(options: argparse.Namespace, path: Path) -> dict:
    """Run what the result file lacks, save after each run, and return the file's content."""
    start = time.time()
    settings = {name: getattr(options, name) for name in ("steps", "batch", "length", "windows")}
    content = json.loads(path.read_text()) if path.exists() else {}
    runs = content["runs"] if content.get("settings") == settings else []
    content = record(torch.device(options.device), settings=settings, runs=runs)
    done = {(run["kind"], run["rate"]) for run in runs}
    jobs = [(kind, rate) for order in (1, 2, 0, 3) for kind, rate in ((k, RATES[k][order]) for k in options.kinds)]
    packed = unpack(options.file)
    print(f"[{time.time() - start:.0f} s] unpacked", flush=True)
    context = mp.get_context("spawn")
    queue, results = context.Queue(), context.Queue()
    for job in [*(job for job in jobs if job not in done), *[None] * options.processes]:
        queue.put(job)
    for _ in range(options.processes):
        context.Process(target=_work, args=(queue, results, packed, options), daemon=True).start()
    working = options.processes
    while working:
        run = results.get()
        if run is None:
            working -= 1
            continue
        if "error" not in run:
            runs.append({**run, "commit": commit()})
            path.write_text(json.dumps(content, indent=1) + "\n")
        print(f"[{time.time() - start:.0f} s] {run}", flush=True)
    return content


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_cuda = torch.cuda.is_available()
    parser.add_argument("--pack", type=Path, metavar="FILE", help="make the file of weights and texts, and end")
    parser.add_argument("--file", type=Path, help="of weights and texts")
    parser.add_argument("--kinds", nargs="+", choices=list(RATES), default=list(RATES))
    parser.add_argument("--processes", type=at_least(1), default=6 if on_cuda else 1)
    parser.add_argument("--steps", type=at_least(1), default=240)
    parser.add_argument("--batch", type=at_least(1), default=8)
    parser.add_argument("--length", type=at_least(2), default=512)
    parser.add_argument("--windows", type=at_least(1), default=160, help="windows of a held-out text at most")
    parser.add_argument("--device", default="cuda" if on_cuda else "cpu")
    parser.add_argument("--out", help="folder of the results (default: benchmarks/results)")
    options = parser.parse_args()
    if options.pack:
        pack(options.pack)
        return
    path = result_path(torch.device(options.device), "finetuning_quality", options.out)
    content = study(options, path)
    header = ["contender", "learning rate", "perplexity before", "perplexity", "against adamw"]
    text = table(header, rows_of(content["runs"]))
    print(text)
    save(path, content, text)


if __name__ == "__main__":
    main()
