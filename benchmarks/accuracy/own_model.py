"""Train a Llama whose bfloat16 weights are its own, on the sources and documents that this machine has.

    python -m benchmarks.accuracy.own_model --folder build/own_model --minutes 7     # again, until it says "finished"
    python -m benchmarks.accuracy.own_model --folder FOLDER --size tiny --steps 20 --batch 2 --bytes 2000000  # on a CPU

110 million parameters, float32 masters and arithmetic in bfloat16, by the tutorial's trainer (tutorials/train_llama.py)
on windows of 1,024 tokens. The first call collects the texts: Python, C and C++ sources and documents of the installed
packages, the standard library and the system's headers, each file's text once. About a fiftieth of the directories of
each kind is held out, whole; of their windows, those are the evaluation whose 13 tokens in a row are in the others
least often, and training loses the windows that share any. Evaluation is thus of text that is less usual than most.

Each call trains for at most --minutes, set-up included, and goes on from the checkpoint with the same bits as a run
without interruption. The last one writes a folder of transformers with its tokenizer: the other benchmarks take it as
``--model FOLDER`` and find their texts in it (texts.pt).
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import random
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from benchmarks.accuracy.subjects import Evaluation, peak_gb
from benchmarks.accuracy.texts import WINDOW, least_shared, package_folders, without_shared
from benchmarks.harness import at_least, record, result_path, save, table
from nvfp4_tensor.checkpoints.models.opening import open_model
from tutorials import train_llama
from tutorials.train_llama import SHAPES, Settings, Trainer

KINDS = {
    "python": (".py", ".pyi"), "headers": (".h", ".hpp", ".cuh", ".cu", ".c", ".cc", ".cpp", ".inl"),
    "documents": (".md", ".rst", ".txt", "METADATA"),
}  # fmt: skip
SYSTEM = ("/usr/include", "/usr/local/include", "/usr/local/cuda/include", "/usr/share/doc", "/usr/lib/python3")
VOCABULARY, END = 16_384, "<|endoftext|>"
BRANCH, BRANCHES_AT = "branch.pt", 0.95
"""A checkpoint at this share of the steps, from which benchmarks.accuracy.own_model_branches trains."""
LARGEST_FILE, TOKENIZER_BYTES, HELD_OUT_BYTES, EVALUATION_WINDOWS = 400_000, 32_000_000, 3_000_000, 32


# --- texts -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class File:
    """A text, its kind, and the directory by which it is held out."""

    kind: str
    directory: str
    text: str


def read(root: Path, path: Path, kind: str) -> File | None:
    """The file, None if it is large, tiny or not UTF-8."""
    try:
        raw = path.read_bytes() if 200 < path.stat().st_size < LARGEST_FILE else b""
        text = raw.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return File(kind, "/".join((root.name, *path.relative_to(root).parts[:-1][:3])), text) if text else None


def files_of(roots: list[Path], limit: int) -> list[File]:
    """At most ``limit`` bytes of files, each text once, in random order."""
    found = []
    for root in roots:
        for folder, _, names in os.walk(root):
            for kind, suffixes in () if folder.endswith("pydoc_data") else KINDS.items():
                found += [(root, Path(folder, name), kind) for name in names if name.endswith(suffixes)]
    found.sort(key=lambda each: each[1])
    random.Random(0).shuffle(found)
    kept: dict[str, File] = {}
    with ThreadPoolExecutor(32) as pool:
        for start in range(0, len(found), 1024):
            for file in pool.map(read, *zip(*found[start : start + 1024], strict=True)):
                if file is not None and file.text not in kept:
                    limit -= len(file.text)
                    if limit < 0:
                        return list(kept.values())
                    kept[file.text] = file
    return list(kept.values())


def held_out(files: list[File]) -> set[str]:
    """Directories, of none much of a kind, that have about a fiftieth of each kind and at most 3 MB."""
    chosen: set[str] = set()
    for kind in KINDS:
        sizes: dict[str, int] = {}
        for file in files:
            if file.kind == kind:
                sizes[file.directory] = sizes.get(file.directory, 0) + len(file.text)
        total = sum(sizes.values())
        left = min(max(total / 50, HELD_OUT_BYTES / 6), total / 10, HELD_OUT_BYTES)
        largest = left / 4
        for directory in sorted(sizes, key=lambda each: zlib.crc32(each.encode())):
            if left > 0 and sizes[directory] < largest:
                chosen.add(directory)
                left -= sizes[directory]
    return chosen


def train_tokenizer(files: list[File]) -> Tokenizer:
    """A byte-level BPE of the first 32 MB, whose digits are tokens of their own."""
    tokenizer = Tokenizer(models.BPE())
    pieces = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence(pieces), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )

    def sample() -> Iterator[str]:
        left = TOKENIZER_BYTES
        for file in files:
            left -= len(file.text)
            if left < 0:
                return
            yield file.text

    tokenizer.train_from_iterator(sample(), trainer)
    return tokenizer


def tokens_of(tokenizer: Tokenizer, files: list[File]) -> Tensor:
    """All texts, each with an end, int16 (count,)."""
    found = []
    for start in range(0, len(files), 1024):
        batch = tokenizer.encode_batch_fast([file.text for file in files[start : start + 1024]])
        found += [np.array([*each.ids, 0], dtype=np.int16) for each in batch]
    return torch.from_numpy(np.concatenate(found))


def prepare(folder: Path, limit: int, roots: list[Path], device: torch.device) -> None:
    """Write the tokenizer, and texts.pt: tokens int16 to train on (count,), and by kind (windows * 1024,)."""
    start = time.perf_counter()

    def say(what: str) -> None:
        print(f"{time.perf_counter() - start:4.0f} s: {what}", flush=True)

    files = files_of(roots, limit)
    sizes = {kind: sum(len(file.text) for file in files if file.kind == kind) / 1e6 for kind in KINDS}
    say(f"{len(files):,} files, " + ", ".join(f"{size:.1f} MB of {kind}" for kind, size in sizes.items()))
    directories = held_out(files)
    rest = [file for file in files if file.directory not in directories]
    tokenizer = train_tokenizer(rest)
    say(f"{tokenizer.get_vocab_size():,} tokens in the vocabulary")
    training = tokens_of(tokenizer, rest)
    say(f"{len(training):,} tokens; {len(directories)} directories held out")
    windows = training[: len(training) // WINDOW * WINDOW].view(-1, WINDOW).to(device)
    evaluation = {}
    for kind in KINDS:
        apart = [file for file in files if file.directory in directories and file.kind == kind]
        tokens = tokens_of(tokenizer, apart) if apart else torch.empty(0, dtype=torch.int16)
        candidates = tokens[: len(tokens) // WINDOW * WINDOW].view(-1, WINDOW).to(device)
        if not len(candidates):
            say(f"{kind}: too few to judge on")
            continue
        evaluation[kind] = least_shared(candidates, windows.flatten(), EVALUATION_WINDOWS).flatten().cpu()
        say(f"{kind}: {evaluation[kind].numel():,} of {candidates.numel():,} tokens to judge on")
    training = without_shared(windows, evaluation.values()).flatten().cpu()
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, bos_token=END, pad_token=END)
    fast.save_pretrained(folder)
    train_llama.save({"training": training, "evaluation": evaluation}, folder / "texts.pt")
    say(f"{hashlib.sha256(training.numpy().tobytes()).hexdigest()[:16]} is the hash of the training text")


# --- training --------------------------------------------------------------------------------------------------------


def train(trainer: Trainer, folder: Path, deadline: float, log: dict[str, Any], save_every: float = 150) -> None:
    """Train to the end or the deadline (of time.perf_counter), and write checkpoints and the log."""
    steps, every = trainer.settings.steps, max(trainer.settings.steps // 60, 1)
    began = saved = time.perf_counter()
    before = log["seconds"]

    def keep() -> None:
        log["seconds"] = before + time.perf_counter() - began
        train_llama.save(trainer.state_dict(), folder / "checkpoint.pt")
        (folder / "training.json").write_text(json.dumps(log, indent=1) + "\n")

    while trainer.step < steps and time.perf_counter() < deadline:
        loss = trainer.train_step()
        if trainer.step == int(BRANCHES_AT * steps):
            train_llama.save(trainer.state_dict(), folder / BRANCH)
        if trainer.step % every == 0 or trainer.step == steps:
            print(f"step {trainer.step} of {steps}: loss {loss.item():.4f}", flush=True)
            if time.perf_counter() - saved > save_every:
                keep()
                saved = time.perf_counter()
        elif trainer.step % 8 == 0 and trainer.settings.device != "cpu":
            torch.cuda.synchronize()  # so that the deadline is of steps that have run
    keep()


NAMES = {
    "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "q": "self_attn.q_proj",
    "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj", "gate": "mlp.gate_proj",
    "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip


def as_transformers(trainer: Trainer) -> Any:
    """The model as transformers' Llama, in bfloat16."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    shape = SHAPES[trainer.settings.size]
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=shape.width, intermediate_size=shape.hidden,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.heads,
        max_position_embeddings=2048, rms_norm_eps=torch.finfo(torch.float32).eps, bos_token_id=0, eos_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}, tie_word_embeddings=False,
        dtype=torch.bfloat16,
    )  # fmt: skip
    outside = {"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    state = {}
    for name, value in trainer.model.named_parameters():
        if name.startswith("layers."):
            _, index, own, _ = name.split(".")
            name = f"model.layers.{index}.{NAMES[own]}.weight"
        state[outside.get(name, name.replace("head.", "lm_head."))] = value.detach().to(torch.bfloat16)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # .to() would round angles too
    model.load_state_dict(state)
    return model.eval()


def finish(trainer: Trainer, folder: Path, texts: dict[str, Any], log: dict[str, Any], out: Path | None) -> None:
    """Write the model, and a result of its losses on the texts."""
    as_transformers(trainer).save_pretrained(folder)
    model = open_model(folder).to(trainer.settings.device)
    evaluation = Evaluation(model, {name: tokens.long() for name, tokens in texts["evaluation"].items()})
    rows: list[dict[str, Any]] = []
    for name, tokens in texts["evaluation"].items():
        loss = torch.cat(evaluation.loss[name]).double().mean().item()
        rows.append({"text": name, "tokens": len(tokens), "loss": loss})
    device = torch.device(trainer.settings.device)
    log |= {"rows": rows, "peak_gb": peak_gb(device)}
    (folder / "training.json").write_text(json.dumps(log, indent=1) + "\n")
    cells = [(row["text"], f"{row['tokens']:,}", f"{row['loss']:.4f}") for row in rows]
    text = (
        f"{log['parameters'] / 1e6:.1f} M parameters, {log['training_tokens'] / 1e6:.1f} M tokens of text, "
        f"{log['steps']} steps of {log['settings']['batch'] * WINDOW:,}, {log['seconds'] / 60:.1f} minutes\n"
        f"{table(('text', 'tokens', 'nats per token'), cells)}"
    )
    print(f"{text}\nfinished: {folder}")
    save(result_path(device, folder.name, out), record(device, **log), text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_cuda = torch.cuda.is_available()
    parser.add_argument("--folder", type=Path, default=Path("build/own_model"), help="of texts and model (%(default)s)")
    parser.add_argument("--minutes", type=float, default=7.0, help="of this call (%(default)s)")
    parser.add_argument("--steps", type=at_least(1), default=4_000, help="of the whole training (%(default)s)")
    parser.add_argument("--batch", type=at_least(1), default=64, help="windows of 1,024 tokens a step (%(default)s)")
    parser.add_argument("--size", choices=("110m", "tiny"), default="110m")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bytes", type=at_least(1), default=300_000_000, help="of texts, at most (%(default)s)")
    parser.add_argument("--roots", nargs="+", type=Path, help="folders of texts, instead of the machine's")
    parser.add_argument("--device", default="cuda" if on_cuda else "cpu")
    parser.add_argument("--out", type=Path, help="of results, instead of benchmarks/results")
    options = parser.parse_args()
    deadline = time.perf_counter() + 60 * options.minutes
    folder, device = options.folder, torch.device(options.device)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "texts.pt").exists():
        system = [path for path in map(Path, SYSTEM) if path.is_dir()]
        prepare(folder, options.bytes, options.roots or [*package_folders(), *system], device)
    texts = torch.load(folder / "texts.pt")
    settings = Settings(
        recipe="bf16", size=options.size, steps=options.steps, batch=options.batch, length=WINDOW,
        vocabulary=VOCABULARY,
        learning_rate=options.learning_rate, warmup=0.03, seed=options.seed, device=options.device,
        compile=device.type == "cuda",
    )  # fmt: skip
    trainer = Trainer(settings, texts["training"], torch.cat(list(texts["evaluation"].values())))
    count = sum(parameter.numel() for parameter in trainer.model.parameters())
    log = {"settings": dataclasses.asdict(settings), "parameters": count, "steps": options.steps,
           "training_tokens": len(texts["training"]), "seconds": 0.0}  # fmt: skip
    if (folder / "checkpoint.pt").exists():
        trainer.load_state_dict(torch.load(folder / "checkpoint.pt"))
        log = json.loads((folder / "training.json").read_text())
    train(trainer, folder, deadline, log)
    if trainer.step == options.steps:
        finish(trainer, folder, texts, log, options.out)
    else:
        print(f"step {trainer.step} of {options.steps}: the same command goes on")


if __name__ == "__main__":
    main()
