"""Tokenizers in GGUF, as the package gguf reads them: tokens, merges, types, and the rule that splits text."""

import json

import pytest
from helpers.checkpoints import TINY, write_gguf
from helpers.llama_cpp import llama_cpp_runner

from nvfp4_tensor import checkpoints
from nvfp4_tensor.checkpoints.formats.gguf import tokenizer as gguf_tokenizer

gguf = pytest.importorskip("gguf")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")


def trained(*steps, begins=False):
    """Of some tokens, the first special; the steps cut the text before it is merged, and ``begins`` puts it first."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    split = any(isinstance(step, tokenizers.pre_tokenizers.Split) for step in steps)
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([*steps, byte_level]) if steps else byte_level
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=40, special_tokens=["<eos>"], show_progress=False)
    tokenizer.train_from_iterator(["the fox and the hen and the dog"], trainer)
    if not begins:
        return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    special = {"single": "<eos> $A", "pair": "<eos> $A <eos> $B", "special_tokens": [("<eos>", 0)]}
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(**special)
    names = {"eos_token": "<eos>", "bos_token": "<eos>", "add_bos_token": True}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def split(pattern):
    return tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")


RULES = {
    "gpt-2": [],
    "smollm": [tokenizers.pre_tokenizers.Digits(individual_digits=True)],
    "llama-bpe": [split(LLAMA_3)],
    "qwen2": [split(LLAMA_3.replace("{1,3}", ""))],
}


TEXTS = ["the fox and 1234567 hens, the dog's", "  then\n\n\tand 3.14 + x!!  ", "<eos>the end<eos>"]


@pytest.mark.filterwarnings("ignore:4 groups of linears")
@pytest.mark.parametrize("rule", RULES)
def test_what_llama_cpp_needs_is_there_and_comes_back(tmp_path, tensors, rule):
    """A folder's tokenizer cuts text as the original did, digits too, and goes into a file again byte for byte."""
    tokenizer = trained(*RULES[rule], begins=rule == "llama-bpe")
    with write_gguf(tmp_path / "a.gguf", tensors, tokenizer=tokenizer) as checkpoint:
        fields = {name: field.contents() for name, field in checkpoint.fields.items() if name.startswith("tokenizer.")}
    assert (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) == ("gpt2", rule)
    vocabulary = tokenizer.get_vocab()
    tokens = fields["tokenizer.ggml.tokens"]
    assert len(tokens) == TINY["vocab_size"] and all(tokens[i] == token for token, i in vocabulary.items())
    assert tokens[len(vocabulary)] == f"[PAD{len(vocabulary)}]"
    kinds, unused = gguf.TokenType, TINY["vocab_size"] - len(vocabulary)
    expected = [kinds.CONTROL] + [kinds.NORMAL] * (len(vocabulary) - 1) + [kinds.UNUSED] * unused
    assert fields["tokenizer.ggml.token_type"] == expected
    assert fields["tokenizer.ggml.eos_token_id"] == tokenizer.eos_token_id
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    assert fields["tokenizer.ggml.merges"] == [" ".join(pair) for pair in merges]
    checkpoints.convert(tmp_path / "a.gguf", tmp_path / "folder", to="modelopt", progress=False)
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "folder")
    assert [read(text).input_ids for text in TEXTS] == [tokenizer(text).input_ids for text in TEXTS]
    config = json.loads((tmp_path / "folder/config.json").read_text())
    assert config["eos_token_id"] == tokenizer.eos_token_id and ("bos_token_id" in config) == (rule == "llama-bpe")
    assert config["dtype"] == "bfloat16"
    (tmp_path / "again").mkdir()
    checkpoints.convert(tmp_path / "folder", tmp_path / "again/a.gguf", to="gguf", progress=False)
    assert (tmp_path / "again/a.gguf").read_bytes() == (tmp_path / "a.gguf").read_bytes()


def test_a_tokenizer_that_is_not_known_is_omitted_with_a_warning(tmp_path, tensors, monkeypatch):
    monkeypatch.setattr(gguf_tokenizer, "_rule_of", lambda *_: "tekken")
    write_gguf(tmp_path / "a.gguf", tensors, tokenizer=trained()).close()
    with pytest.warns(UserWarning, match=r"tokenizer of a\.gguf is omitted, .* split by the rule 'tekken'"):
        checkpoints.convert(tmp_path / "a.gguf", tmp_path / "folder", to="modelopt", progress=False)
    assert not (tmp_path / "folder/tokenizer.json").exists()


def test_that_of_a_folder_of_another_file_and_none(tmp_path, tensors):
    trained().save_pretrained(tmp_path / "tokenizer")
    with write_gguf(tmp_path / "a.gguf", tensors, tokenizer=tmp_path / "tokenizer") as a:
        checkpoints.convert(tmp_path / "a.gguf", tmp_path / "b.gguf", to="gguf", progress=False)
        names = [name for name in a.fields if name.startswith("tokenizer.")]
        with checkpoints.read(tmp_path / "b.gguf") as b:
            assert len(names) > 5 and all(a.fields[n].contents() == b.fields[n].contents() for n in names)
    none = write_gguf(tmp_path / "c.gguf", tensors, tokenizer=None)
    assert none.fields["tokenizer.ggml.model"].contents() == "no_vocab"
    with pytest.warns(UserWarning, match="gets no tokenizer"):
        write_gguf(tmp_path / "d.gguf", tensors, tokenizer="own")


def of_words():
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "fox": 1}, unk_token="<unk>"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words)


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (lambda: trained(tokenizers.pre_tokenizers.Whitespace()), "splits text by Whitespace [+] ByteLevel"),
        (lambda: trained(split("[a-z]+")), "splits text by Split [+] ByteLevel"),
        (lambda: "nowhere", r"nowhere has no tokenizer\.json"),
        (of_words, "has a tokenizer of type WordLevel, expected BPE"),
    ],
)
def test_what_raises_an_error(tmp_path, tensors, tokenizer, message):
    with pytest.raises(ValueError, match=message):
        write_gguf(tmp_path / "a.gguf", tensors, tokenizer=tokenizer())
    assert not list(tmp_path.iterdir())


def sentencepiece(prepends):
    """Like those that transformers converts from SentencePiece: bytes for what has no token, and a sign for spaces."""
    space, byte_tokens = "\u2581", [f"<0x{i:02X}>" for i in range(256)]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(replacement=space, prepend_scheme="never")
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>", "<s>", "</s>", *byte_tokens], show_progress=False
    )
    text = "the fox and the hen and the other dog: whether they gather, then rather altogether; " * 3
    tokenizer.train_from_iterator([text], trainer)
    content = json.loads(tokenizer.to_str())
    content["model"] |= {"byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True}
    steps = [{"type": "Replace", "pattern": {"String": " "}, "content": space}]
    if prepends:
        steps.insert(0, {"type": "Prepend", "prepend": space})
    content |= {"normalizer": {"type": "Sequence", "normalizers": steps}, "pre_tokenizer": None}
    content["added_tokens"] = [each for each in content["added_tokens"] if each["id"] < 3]
    made = tokenizers.Tokenizer.from_str(json.dumps(content))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


@pytest.mark.parametrize("prepends", [True, False], ids=["Llama 2", "Gemma"])
def test_sentencepiece_merges_in_the_order_of_its_merges(tmp_path, tensors, prepends):
    tokenizer = sentencepiece(prepends)
    config = TINY | {"vocab_size": 512}
    tensors = {name: t for name, t in tensors.items() if name not in ("model.embed_tokens.weight", "lm_head.weight")}
    with write_gguf(tmp_path / "a.gguf", tensors, config, tokenizer=tokenizer) as checkpoint:
        fields = {name: field.contents() for name, field in checkpoint.fields.items() if name.startswith("tokenizer.")}
    get = {key.removeprefix("tokenizer.ggml."): value for key, value in fields.items()}
    assert get["model"] == "llama" and get["add_space_prefix"] is prepends and len(get["tokens"]) == 512
    kinds = gguf.TokenType
    assert get["token_type"][:3] == [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL]
    assert get["token_type"][3:259] == [kinds.BYTE] * 256 and get["token_type"][-1] == kinds.UNUSED
    score = dict(zip(get["tokens"], get["scores"], strict=True))
    merges = [first + second for first, second in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]]
    assert len(set(merges)) > 30
    in_order = [score[token] for token in dict.fromkeys(merges)]
    assert in_order == sorted(in_order, reverse=True) and len(set(in_order)) == len(in_order)
    assert max(s for token, s in score.items() if token not in merges) < min(in_order)


@pytest.mark.slow
@pytest.mark.parametrize("prepends", [True, False], ids=["Llama 2", "Gemma"])
def test_llama_cpp_splits_text_like_sentencepiece(tmp_path, tensors, prepends):
    tokenizer = sentencepiece(prepends)
    tensors = {name: t for name, t in tensors.items() if name not in ("model.embed_tokens.weight", "lm_head.weight")}
    write_gguf(tmp_path / "a.gguf", tensors, TINY | {"vocab_size": 512}, tokenizer=tokenizer)
    runner = llama_cpp_runner(tmp_path / "a.gguf", vocab_only=True)
    for text in ("the other fox and the hen", "whether altogether  rather", "dog: \u6570 the the", "gatherthen"):
        want = tokenizer(text, add_special_tokens=False).input_ids
        assert runner.tokenize(text.encode(), add_bos=False, special=False) == want, text
