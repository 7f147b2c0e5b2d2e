"""The tokenizer of a GGUF file: to and from transformers. Without it, llama.cpp runs on tokens only."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvfp4_tensor.checkpoints.io.safetensors import read_json

if TYPE_CHECKING:
    import gguf
    import tokenizers

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
"""Values of gguf.TokenType: special tokens, added words, and padding of the vocabulary."""

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_DIGITS = {"llama-bpe": r"\p{N}{1,3}", "qwen2": r"\p{N}"}
_RULES = ("gpt-2", "smollm", *_DIGITS)
"""The supported rules of llama.cpp that split text before merging."""


def tokenizer_of(path: Path, fields: Mapping[str, gguf.ReaderField]) -> Any:
    """Return the tokenizer of a GGUF file, or None if it has none.

    Byte-level tokenizers are built here, because transformers splits text by GPT-2's rule if it does not know
    llama.cpp's.

    Raises:
        ImportError: transformers is not installed.
        ValueError: the rule that splits text is not supported, or transformers cannot read the file.
    """
    prefix = "tokenizer.ggml."
    values = {key.removeprefix(prefix): field.contents() for key, field in fields.items() if key.startswith(prefix)}
    if values.get("model") in (None, "no_vocab"):
        return None
    import transformers

    if values["model"] != "gpt2":  # SentencePiece's
        return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    if values.get("pre") not in _RULES:
        raise ValueError(f"text is split by the rule {values.get('pre')!r}: expected {', '.join(_RULES)}")
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {
        f"{name}_token": values["tokens"][i]
        for name, key in names.items()
        if (i := values.get(f"{key}_token_id")) is not None
    }
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=_byte_level(values), **special)
    template = fields.get("tokenizer.chat_template")
    if template is not None:
        tokenizer.chat_template = template.contents()
    return tokenizer


def _byte_level(values: Mapping[str, Any]) -> tokenizers.Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors

    tokens, kinds = values["tokens"], values["token_type"]
    vocabulary = {token: i for i, token in enumerate(tokens) if kinds[i] != _UNUSED}
    merges = [(first, second) for first, _, second in (merge.partition(" ") for merge in values.get("merges", ()))]
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = _pre_tokenizer(values["pre"], bool(values.get("add_space_prefix", False)))
    made.decoder = decoders.ByteLevel()
    if values.get("add_bos_token"):
        bos = tokens[values["bos_token_id"]]
        made.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, values["bos_token_id"])]
        )
    made.add_special_tokens(
        [AddedToken(t, special=True) for t, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    )
    made.add_tokens(
        [AddedToken(t, special=False) for t, kind in zip(tokens, kinds, strict=True) if kind == _USER_DEFINED]
    )
    return made


def _pre_tokenizer(rule: str, prefixed: bool) -> Any:
    """Return the pre-tokenizer of a rule."""
    from tokenizers import Regex, pre_tokenizers

    if rule == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=prefixed)
    if rule == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=prefixed)])
    split = pre_tokenizers.Split(Regex(_SPLIT.replace("DIGITS", _DIGITS[rule])), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=prefixed, use_regex=False)])


# --- writing --------------------------------------------------------------------------------------------------------

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
        for key, field in source.items():
            if key.startswith("tokenizer."):
                inner = field.types[-1] if len(field.types) > 1 else None
                writer.add_key_value(key, field.contents(), field.types[0], sub_type=inner)
    else:
        with _folder(source) as folder:
            _add_folder(writer, folder, vocab_size)


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
        writer.add_tokenizer_pre(_rule_of(content, path))
        tokens = _tokens_of(content, vocab_size)
        writer.add_token_list([token for token, _ in tokens])
        writer.add_token_types([kind for _, kind in tokens])
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


def _rule_of(content: dict[str, Any], path: Path) -> str:
    """Return llama.cpp's name for the rule that splits text before merging."""
    steps = _steps(content.get("pre_tokenizer"))
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
        return "smollm"
    if kinds == ["Split", "ByteLevel"]:
        pattern = steps[0]["pattern"].get("Regex", "")
        for name, digits in _DIGITS.items():
            if rf"{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*" in pattern:
                return name
    raise ValueError(
        f"{path} splits text by {' + '.join(kinds) or 'nothing'}, which matches no known rule of llama.cpp: pass "
        "tokenizer=None for a file that runs on tokens only"
    )
