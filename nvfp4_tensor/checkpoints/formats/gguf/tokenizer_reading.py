"""The tokenizer of a GGUF file as one of transformers, which a folder can hold."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import gguf
    import tokenizers

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
"""gguf.TokenType: special tokens, whole words, and what only fills the vocabulary up."""

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_DIGITS = {"llama-bpe": r"\p{N}{1,3}", "qwen2": r"\p{N}"}
_RULES = ("gpt-2", "smollm", *_DIGITS)
"""llama.cpp's names of how text is cut before it is merged, those that are known here."""


def tokenizer_of(path: Path, fields: Mapping[str, gguf.ReaderField]) -> Any:
    """The tokenizer of a GGUF; None where the file has none.

    Byte-level ones are made here: transformers cuts text by GPT-2's rule where it does not know llama.cpp's.

    Raises:
        ImportError: transformers is not installed.
        ValueError: the rule by which text is cut before merging is not known here, or transformers reads no such file.
    """
    prefix = "tokenizer.ggml."
    said = {key.removeprefix(prefix): field.contents() for key, field in fields.items() if key.startswith(prefix)}
    if said.get("model") in (None, "no_vocab"):
        return None
    import transformers

    if said["model"] != "gpt2":  # SentencePiece's
        return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    if said.get("pre") not in _RULES:
        raise ValueError(f"text is cut by the rule {said.get('pre')!r}, and {', '.join(_RULES)} are known")
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {
        f"{ours}_token": said["tokens"][i]
        for ours, key in names.items()
        if (i := said.get(f"{key}_token_id")) is not None
    }
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=_byte_level(said), **special)
    template = fields.get("tokenizer.chat_template")
    if template is not None:
        tokenizer.chat_template = template.contents()
    return tokenizer


def _byte_level(said: Mapping[str, Any]) -> tokenizers.Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors

    tokens, kinds = said["tokens"], said["token_type"]
    vocabulary = {token: i for i, token in enumerate(tokens) if kinds[i] != _UNUSED}
    merges = [(first, second) for first, _, second in (merge.partition(" ") for merge in said.get("merges", ()))]
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = _cut(said["pre"], bool(said.get("add_space_prefix", False)))
    made.decoder = decoders.ByteLevel()
    if said.get("add_bos_token"):
        bos = tokens[said["bos_token_id"]]
        made.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, said["bos_token_id"])]
        )
    made.add_special_tokens(
        [AddedToken(t, special=True) for t, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    )
    made.add_tokens(
        [AddedToken(t, special=False) for t, kind in zip(tokens, kinds, strict=True) if kind == _USER_DEFINED]
    )
    return made


def _cut(rule: str, prefixed: bool) -> Any:
    """How text is cut before it is merged."""
    from tokenizers import Regex, pre_tokenizers

    if rule == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=prefixed)
    if rule == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=prefixed)])
    split = pre_tokenizers.Split(Regex(_SPLIT.replace("DIGITS", _DIGITS[rule])), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=prefixed, use_regex=False)])
