"""Write a tokenizer to a GGUF file. Without it, llama.cpp runs on tokens only."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvfp4_tensor.checkpoints.io.safetensors import read_json

if TYPE_CHECKING:
    import gguf

_PREFIX = "tokenizer."

# A distinctive substring of the pattern by which a byte-level tokenizer splits text, and llama.cpp's name for it.
_PATTERNS = (
    (r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*", "llama-bpe"),
    (r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*", "qwen2"),
)


_BYTE = re.compile("<0x[0-9A-F]{2}>")


def add_tokenizer(writer: gguf.GGUFWriter, source: Any, vocab_size: int) -> None:
    """Write the tokenizer ``source`` to a GGUF file.

    Args:
        source: a tokenizer of transformers, a folder with tokenizer.json, the fields of another GGUF (a
            ``GGUFReader``'s), or None for a file that only runs on tokens.

    Raises:
        ValueError: its type is not supported by llama.cpp.
    """
    if source is None:
        writer.add_tokenizer_model("no_vocab")
    elif isinstance(source, dict):
        _copy(writer, source)
    else:
        with _folder(source) as folder:
            _add_folder(writer, folder, vocab_size)


def _copy(writer: gguf.GGUFWriter, fields: dict[str, gguf.ReaderField]) -> None:
    for key, field in fields.items():
        if key.startswith(_PREFIX):
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type=inner)


@contextmanager
def _folder(source: Any) -> Iterator[Path]:
    """Yield a folder with the files of a tokenizer: the given one, or a temporary one that it is saved to."""
    if isinstance(source, str | Path):
        yield Path(source)
        return
    with tempfile.TemporaryDirectory() as folder:
        source.save_pretrained(folder)
        yield Path(folder)


def _add_folder(writer: gguf.GGUFWriter, folder: Path, vocab_size: int) -> None:
    import gguf

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no tokenizer.json: pass tokenizer=FOLDER with another, or tokenizer=None")
    content = read_json(path)
    if content["model"].get("type") != "BPE":
        raise ValueError(f"{path} has a tokenizer of type {content['model'].get('type')}, expected BPE")
    if content["model"].get("byte_fallback"):
        _add_sentencepiece(writer, content, vocab_size)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_pre_tokenizer(content, path))
        _add_tokens(writer, content, vocab_size)
    gguf.SpecialVocab(folder, load_merges=True, n_vocab=vocab_size).add_to_gguf(writer, quiet=True)
    prefix = _prefixed(content)
    if prefix is not None:
        writer.add_add_space_prefix(prefix)


def _prefixed(content: dict[str, Any]) -> bool | None:
    """Return whether tokenizer.json adds a space before the first word; None if it has no such setting."""
    for step in _steps(content.get("pre_tokenizer")):
        if step["type"] in ("ByteLevel", "Metaspace"):
            return bool(step.get("add_prefix_space", step.get("prepend_scheme") in ("first", "always")))
    if content["model"].get("byte_fallback"):  # SentencePiece's: Llama 2 prepends a space, Gemma does not
        normalizer = content.get("normalizer") or {}
        return any(step["type"] == "Prepend" for step in normalizer.get("normalizers", [normalizer]) if step)
    return None


def _add_sentencepiece(writer: gguf.GGUFWriter, content: dict[str, Any], vocab_size: int) -> None:
    """Write a tokenizer that was converted from SentencePiece (Llama 2, Mistral, Gemma, Phi-3).

    llama.cpp merges the neighbours whose union has the highest score. tokenizer.json has no scores, but the order of
    merges, which was made from them.
    """
    import gguf

    kinds = gguf.TokenType
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(content["model"]["merges"]):
        first, second = merge.split(" ") if isinstance(merge, str) else merge
        ranks.setdefault(first + second, rank)
    unknown = content["model"].get("unk_token")
    tokens = _tokens_of(content, vocab_size)
    scores = [-float(ranks.get(token, len(ranks) + i)) for i, (token, _) in enumerate(tokens)]
    types = []
    for token, kind in tokens:
        if token == unknown:
            kind = kinds.UNKNOWN
        elif kind == kinds.NORMAL and _BYTE.fullmatch(token):
            kind = kinds.BYTE
        types.append(kind)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([token for token, _ in tokens])
    writer.add_token_scores(scores)
    writer.add_token_types(types)


def _add_tokens(writer: gguf.GGUFWriter, content: dict[str, Any], vocab_size: int) -> None:
    tokens = _tokens_of(content, vocab_size)
    writer.add_token_list([token for token, _ in tokens])
    writer.add_token_types([kind for _, kind in tokens])


def _tokens_of(content: dict[str, Any], vocab_size: int) -> list[tuple[str, int]]:
    """Return every token and its type, by its number."""
    import gguf

    tokens = {index: (token, gguf.TokenType.NORMAL) for token, index in content["model"]["vocab"].items()}
    for added in content["added_tokens"]:
        kind = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        tokens[added["id"]] = added["content"], kind
    return [tokens.get(i, (f"[PAD{i}]", gguf.TokenType.UNUSED)) for i in range(max(vocab_size, max(tokens) + 1))]


def _steps(pre_tokenizer: dict[str, Any] | None) -> list[dict[str, Any]]:
    if pre_tokenizer is None:
        return []
    return pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]


def _pre_tokenizer(content: dict[str, Any], path: Path) -> str:
    """Return llama.cpp's name for the rule that splits text before merging."""
    steps = _steps(content.get("pre_tokenizer"))
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
        return "smollm"
    if kinds == ["Split", "ByteLevel"]:
        pattern = steps[0]["pattern"].get("Regex", "")
        for substring, name in _PATTERNS:
            if substring in pattern:
                return name
    raise ValueError(
        f"{path} splits text by {' + '.join(kinds) or 'nothing'}, which matches no known rule of llama.cpp: pass "
        "tokenizer=None for a file that runs on tokens only"
    )
