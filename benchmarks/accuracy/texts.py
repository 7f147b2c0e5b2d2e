"""The texts of installed packages: docstrings, headers, and what may not be in two of them, 13 tokens in a row."""

from __future__ import annotations

import ast
import copy
import multiprocessing
import random
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nvfp4_tensor.generation import decode_natively
from nvfp4_tensor.quantization import generate_calibration_text

WINDOW, NGRAM = 1_024, 13
QUESTIONS = (
    "How do I bake bread?", "Explain gravity to a child.", "Write a short story about a lighthouse.",
    "What should I pack for a week in the mountains?", "Why is the sky blue?", "Write a poem about autumn.",
    "How does a bicycle stay upright?", "Give me tips to learn a language.", "What causes inflation?",
    "Describe a day in ancient Rome.", "How can I sleep better?", "Write an email that asks for a day off.",
    "What is photosynthesis?", "Plan a birthday party for ten people.", "How do vaccines work?",
    "Compare cats and dogs as pets.",
)  # fmt: skip


def docstrings_of(path: Path) -> str:
    """The docstrings of a file, "" if it is not Python that this interpreter reads."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in others' strings
            tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, OSError, RecursionError):
        return ""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    return "\n\n".join(text for text in found if text and len(text) > 80)


def library_docstrings() -> str:
    """Those of the standard library's modules, in the order of the files' names."""
    return "\n\n".join(filter(None, map(docstrings_of, sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))))


def package_folders() -> list[Path]:
    """Where installed packages and the standard library are."""
    entries = (*sys.path, sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"))
    folders = {Path(entry).resolve() for entry in entries if "site-packages" in entry or "lib/python" in entry}
    return sorted(folder for folder in folders if folder.is_dir() and folder.parents[0] not in folders)


def docstring_tokens(tokenizer: Any, processes: int, limit: int, files: int | None) -> Tensor:
    """The docstrings of all packages but the help topics as tokens, int64 (count,), each file's text once."""
    found = sorted({path.resolve() for folder in package_folders() for path in folder.rglob("*.py")})
    paths = [path for path in found if path.parent.name != "pydoc_data"]
    paths = random.Random(0).sample(paths, len(paths))[:files]
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        texts = list(dict.fromkeys(text for text in pool.map(docstrings_of, paths, chunksize=16) if text))
    tokens: list[Tensor] = []
    total = 0
    for start in range(0, len(texts), 512):
        if total >= limit:
            break
        for ids in tokenizer(texts[start : start + 512], add_special_tokens=False).input_ids:
            tokens.append(torch.tensor([*ids, 0]))  # 0 ends a text
            total += len(ids) + 1
    return torch.cat(tokens)[:limit]


def header_tokens(tokenizer: Any, count: int) -> Tensor:
    """The first tokens of C and C++ headers of torch."""
    folder = Path(torch.__file__).parent / "include"
    text = ""
    for path in sorted(folder.rglob("*.h")):
        text += path.read_text(encoding="utf-8", errors="ignore")
        if len(text) > 16 * count:
            break
    ids: Tensor = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids[0]
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


def written_tokens(model: Any, tokenizer: Any, count: int, seed: int) -> Tensor:
    """Text and conversations that the dense model writes, by :func:`generate_calibration_text`, int64 (count,)."""
    model = decode_natively(copy.deepcopy(model)) if next(model.parameters()).is_cuda else model
    found = generate_calibration_text(model, count, window=WINDOW, seed=seed, tokenizer=tokenizer)
    return torch.cat(found).flatten()[:count].cpu()


# --- 13 tokens in a row ----------------------------------------------------------------------------------------------


def ngrams(tokens: Tensor) -> Tensor:
    """A hash, int64, of each 13 tokens in a row along the last dimension."""
    factors = torch.randint(-(2**62), 2**62, (NGRAM,), generator=torch.Generator().manual_seed(0)) | 1
    count = tokens.shape[-1] - NGRAM + 1
    found = torch.zeros((*tokens.shape[:-1], count), dtype=torch.int64, device=tokens.device)
    for i, factor in enumerate(factors.tolist()):
        found += (tokens[..., i : i + count].long() + 1) * factor  # modulo 2^64
    return found


def least_shared(candidates: Tensor, training: Tensor, count: int) -> Tensor:
    """The ``count`` of the windows (n, 1024) whose 13 tokens in a row are in training (tokens,) least often."""
    seen, place = ngrams(candidates).unique(return_inverse=True)
    hashes = ngrams(training)
    found = torch.searchsorted(seen, hashes).clamp(max=len(seen) - 1)
    times = torch.bincount(found[seen[found] == hashes], minlength=len(seen))
    order = times[place].sum(1).argsort(stable=True)[:count]
    return candidates[order.sort().values]


def without_shared(windows: Tensor, evaluation: Iterable[Tensor]) -> Tensor:
    """Leave out the training windows (count, 1024) that share 13 tokens in a row with an evaluation text.

    No 13 tokens of what is kept, read one window after another, are in an evaluation text.
    """
    seen = torch.cat([ngrams(tokens.to(windows.device)) for tokens in evaluation]).unique()
    before, bad = len(windows), torch.ones(1, dtype=torch.bool)
    while bad.any():
        hit = torch.isin(ngrams(windows.flatten()), seen)
        flags = torch.zeros(windows.numel(), dtype=torch.bool, device=windows.device)
        for i in (0, NGRAM - 1):  # the windows of its first and last token
            flags[i : i + len(hit)] |= hit
        bad = flags.view(windows.shape).any(1)
        windows = windows[~bad]
    assert len(windows), "every window of the training text shares 13 tokens with an evaluation text"
    print(f"training text: {windows.numel():,} tokens, {before - len(windows)} of {before} windows left out")
    return windows


def calibration_batches(tokens: Tensor, count: int, window: int) -> Sequence[Tensor]:
    """``count`` of tokens (all,), evenly taken from them, in windows (1, window)."""
    windows = tokens[: len(tokens) // window * window].view(-1, 1, window)
    wanted = count // window
    return list(windows[:: max(len(windows) // wanted, 1)][:wanted].long())
