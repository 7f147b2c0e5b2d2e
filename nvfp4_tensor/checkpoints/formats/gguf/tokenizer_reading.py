"""Convert the tokenizer of a GGUF file to a transformers tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
