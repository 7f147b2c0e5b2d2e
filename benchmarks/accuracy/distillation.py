"""What distillation gives back, by minutes of training, on three texts that training never saw.

    python -m benchmarks.accuracy.distillation --rows w4a4 --minutes 6.5                  # one call of 9 minutes
    python -m benchmarks.accuracy.distillation --rows w4a4 w4a16 --minutes 3
    python -m benchmarks.accuracy.distillation --rows w4a4:learning_rate=2e-4 w4a4:start=gptq
    python -m benchmarks.accuracy.distillation --minutes 10 --folder build/distill --budget 420    # again: goes on
    python -m benchmarks.accuracy.distillation --model build/own_model                    # of own_model, on its texts
    python -m benchmarks.accuracy.distillation --folder FOLDER --written 48000000 --prepare 1 2 3  # beside 4 to 12

A row is a format, and after a colon changes: fields of DistillConfig, or ``start=gptq``.

SmolLM2-135M of the demo (decoded Q4_1) trains on the docstrings of the installed packages, and on what the dense model
writes itself: half goes on from random tokens, half is conversations, with the user's messages its own. It is judged on
32,768 tokens each of Python's help topics, of C headers, and of answers of the dense model to 16 questions, in windows
of 1,024 that do not see each other. Windows of the training text that share 13 tokens in a row with one of the texts
are left out. Increases are of the negative log likelihood a token over bfloat16. Minutes are those of training, with
compilation (on a GPU), without evaluations. A result file keeps its other rows. A ``--folder`` keeps the texts, too.
"""

from __future__ import annotations

import argparse
import ast
import copy
import functools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from benchmarks.accuracy import subjects
from benchmarks.accuracy.subjects import Evaluation, open_subject, peak_gb, text_cells, text_heads, with_earlier
from benchmarks.accuracy.texts import WINDOW, without_shared, written_tokens
from benchmarks.harness import at_least, record, result_path, save, table
from nvfp4_tensor import NVFP4Config, NVFP4WeightOnlyConfig, QuantizeSpec
from nvfp4_tensor.quantization import GPTQConfig, gptq
from nvfp4_tensor.training import DistillConfig, distill
from nvfp4_tensor.training.distillation import Progress

TOKENS, PART = 32_768, 4_000_000
Subject: TypeAlias = subjects.SmolLM2 | subjects.OwnModel
SEARCH = QuantizeSpec(scale_search="mse", scale_ceiling=448)
FORMATS = {"w4a4": NVFP4Config(), "w4a16": NVFP4WeightOnlyConfig(), "w4a4_search": NVFP4Config(weight_spec=SEARCH),
           "w4a4_activations": NVFP4Config(activation_spec=QuantizeSpec(scale_search="mse")),
           "w4a4_rows": NVFP4Config(row_scaled=True)}  # fmt: skip


def parse(row: str, device: torch.device) -> tuple[Any, DistillConfig, dict[str, str]]:
    """The format, the config and the other options of a row."""
    name, _, rest = row.partition(":")
    options = dict(each.split("=") for each in rest.split(",") if each)
    own = {key: options.pop(key) for key in ("start",) if key in options}
    changes: dict[str, Any] = {key: ast.literal_eval(value) if value[0] not in "abcdefghijklmnopqrstuvwxyz" else value
                               for key, value in options.items()}  # fmt: skip
    base = None if own.get("start") == "gptq" else FORMATS[name]
    changes.setdefault("compile", device.type == "cuda")
    return FORMATS[name], DistillConfig(base_config=base, **changes), own


def run_row(
    row: str, dense: nn.Module, batches: Sequence[Tensor], evaluation: Evaluation, options: argparse.Namespace
) -> dict[str, Any]:
    """One row, from the dense model on: the curve and the end."""
    model, curve, began = copy.deepcopy(dense), [], time.perf_counter()
    device = next(model.parameters()).device
    base, config, own = parse(row, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
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
    name = f"{device.type}_{row.replace(':', '_').replace('=', '_')}"
    folder = None if options.folder is None else options.folder / name
    last: list[Progress] = []
    distill(model, batches, config, minutes=options.minutes, steps=options.steps, folder=folder, progress=True,
            on_step=lambda each: (last.append(each), on_step(each)), **arguments)  # fmt: skip
    end = last[-1]
    point(end.step, end.seconds, end.loss)
    return {"row": row, "curve": curve, "texts": curve[-1]["texts"], "steps": end.step, "minutes": end.seconds / 60,
            "tokens": end.step * batches[0].numel() * config.batches_per_step, "memory_gb": peak_gb(device),
            "seed": config.seed}  # fmt: skip


def report(rows: Sequence[dict[str, Any]]) -> str:
    """The table of the rows."""
    lines = [(row["row"], f"{row['minutes']:.1f}", f"{row['tokens'] / 1e6:.1f} M", *text_cells(row)) for row in rows]
    return table(("row", "minutes", "tokens seen", *text_heads(rows[0])), lines)


def kept(options: argparse.Namespace, name: str, make: Callable[[], Any]) -> Any:
    """What a file of ``--folder`` keeps, made if it is not there; without the option, made."""
    path = None if options.folder is None else options.folder / f"{name}.pt"
    if path is not None and path.exists():
        return torch.load(path)
    value = make()
    print(f"{time.perf_counter() - options.start:.0f} s: {name}", flush=True)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(value, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)
    return value


def written(subject: Subject, options: argparse.Namespace, parts: Iterable[int]) -> list[Tensor]:
    """Parts, from 1 on, of what the dense model writes, int64 (count,) each."""
    dense, found = subject.model.to(options.device), []
    for part in parts:
        count = min(options.written - (part - 1) * PART, PART)
        make = functools.partial(written_tokens, dense, subject.tokenizer, count, seed=part)
        found.append(kept(options, f"written_{subject.name}_{part}_{count}", make))
    return found


def prepare(subject: Subject, options: argparse.Namespace) -> tuple[Tensor, dict[str, Tensor]]:
    """The windows to train on, int64 (count, 1024), and the evaluation texts."""
    make: Callable[[], Any] = functools.partial(subject.training, options.processes, options.limit, options.files)
    ids = kept(options, f"training_{subject.name}_{options.limit}", make)  # forks: before CUDA
    subject.model.to(options.device)
    names, texts = options.texts or subject.text_names, {}
    for name in names:
        make = functools.partial(subject.texts, [name], options.tokens)
        texts |= kept(options, f"{name}_{subject.name}_{options.tokens}", make)
    ids = torch.cat([ids, *written(subject, options, range(1, -(-options.written // PART) + 1))])
    windows = ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW).to(options.device)
    return without_shared(windows, texts.values()), texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", default=["w4a4", "w4a16"], help="none: only make the texts")
    parser.add_argument("--model", type=Path, help="a folder of benchmarks.accuracy.own_model, instead of SmolLM2")
    parser.add_argument("--texts", nargs="+", help="to judge on, by default all of the model")
    parser.add_argument("--minutes", type=float, default=3.0, help="of training, a row (%(default)s)")
    parser.add_argument("--steps", type=int, help="at most")
    parser.add_argument("--every", type=float, default=1.0, help="minutes between points of the curve (%(default)s)")
    parser.add_argument("--curve-windows", type=int, default=8, help="of each text, for the curve (%(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="windows of 1,024 tokens a step (%(default)s)")
    parser.add_argument("--window", type=int, default=WINDOW, help="of training (%(default)s)")
    parser.add_argument("--limit", type=int, default=16_000_000, help="tokens of training text (%(default)s)")
    parser.add_argument("--written", type=int, help="tokens that the dense model writes (SmolLM2: 8 million)")
    parser.add_argument("--files", type=int, help="Python files to read, by default all")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each evaluation text (%(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--folder", type=Path, help="from which an interrupted run goes on")
    parser.add_argument("--prepare", type=at_least(1), nargs="+", help="only these parts, of 4 million, of --written")
    parser.add_argument("--budget", type=float, help="seconds of this call after which a run with --folder stops")
    parser.add_argument("--out", type=Path, help="of results, instead of benchmarks/results")
    options = parser.parse_args()
    options.start, device = time.perf_counter(), torch.device(options.device)
    for row in options.rows:
        parse(row, device)
    subject = open_subject(options.model)
    options.written = subject.written if options.written is None else options.written
    if options.prepare:
        written(subject, options, options.prepare)
        return
    ids, texts = prepare(subject, options)
    dense, ids = subject.model.to(device), ids.flatten()
    windows = ids[: len(ids) // options.window * options.window].view(-1, options.window)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0)).to(device)
    batches = list(windows[order].split(options.batch))
    batches = batches[:-1] if len(batches) > 1 else batches
    evaluation = Evaluation(dense, texts)
    print(f"{time.perf_counter() - options.start:.0f} s: ready, {len(batches)} batches", flush=True)
    path, rows = result_path(device, f"distillation_{subject.name}", options.out), []
    for row in options.rows:
        try:
            rows.append(run_row(row, dense, batches, evaluation, options))
        except KeyboardInterrupt:
            print(f"{row} stopped: the same command goes on with {options.folder}")
            return
        settings = {"model": subject.label, "tokens": options.tokens, "texts": list(texts)}
        every = with_earlier(path, rows[-1:], "row", **settings)
        text = f"{subject.label}\n{report(every)}"
        save(path, record(device, **settings, rows=every), text)
        print(text, flush=True)


if __name__ == "__main__":
    main()
