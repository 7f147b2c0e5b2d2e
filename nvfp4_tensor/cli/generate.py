"""``nvfp4 generate`` and ``nvfp4 chat``: a first look at what a quantized model says."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nvfp4_tensor.cli.models import open_model, open_tokenizer
from nvfp4_tensor.cli.results import plain

LEAST_LENGTH = 512
"""Tokens that the cache of a compiled model holds at least."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a model wrote."""

    prompt: str
    text: str
    prompt_tokens: int
    new_tokens: int
    seconds: float

    def as_json(self) -> Any:
        return plain(self) | {"tokens_per_second": round(self.new_tokens / self.seconds, 2)}


class Writer:
    """A model and its tokenizer, opened once."""

    def __init__(
        self, path: Path, config_from: Path | None, *, max_new_tokens: int, temperature: float, seed: int,
        compiled: bool = False,
    ) -> None:  # fmt: skip
        self.tokenizer: Any = open_tokenizer(config_from, path)
        self.model: Any = open_model(path, config_from)
        self.settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
        if temperature > 0:
            self.settings["temperature"] = temperature
        else:  # a checkpoint's own settings of sampling, of which transformers would complain
            self.settings.update(temperature=None, top_p=None, top_k=None)
        self.compiled = compiled
        if compiled:
            self.settings["compile_config"] = _compile_config(self.model)
        torch.manual_seed(seed)

    def tokens(self, messages: list[dict[str, str]], raw: bool) -> Tensor:
        """What the model reads, (1, tokens): by its chat template, if it has one and ``raw`` does not forbid it."""
        if raw or not self.tokenizer.chat_template:
            text = "\n".join(message["content"] for message in messages)
        else:
            text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids: Tensor = self.tokenizer(text, return_tensors="pt").input_ids
        if not ids.numel():
            raise ValueError("the prompt is empty: give some text")
        return ids

    @torch.no_grad()
    def answer(self, messages: list[dict[str, str]], *, raw: bool = False, stream: bool) -> Answer:
        """Go on from the messages; ``stream`` prints while it writes."""
        ids = self.tokens(messages, raw)
        streamer = None
        if stream:
            from transformers import TextStreamer

            streamer = TextStreamer(self.tokenizer, skip_prompt=not raw, skip_special_tokens=True)
        start = time.perf_counter()
        written = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), streamer=streamer, pad_token_id=self.tokenizer.eos_token_id or 0,
            past_key_values=self._cache(ids) if self.compiled else None, **self.settings,
        )[0, ids.shape[1] :]  # fmt: skip
        seconds = time.perf_counter() - start
        text = self.tokenizer.decode(written, skip_special_tokens=True)
        return Answer(messages[-1]["content"], text, ids.shape[1], len(written), seconds)

    def _cache(self, ids: Tensor) -> Any:
        """Keys and values of a length that few prompts differ in: each length is compiled for."""
        from transformers import StaticCache

        length = max(ids.shape[1] + self.settings["max_new_tokens"], LEAST_LENGTH)
        return StaticCache(config=self.model.config, max_cache_len=1 << (length - 1).bit_length())


def _compile_config(model: Any) -> Any:
    """How transformers compiles the step of one token, which it does for GPUs alone unless told to."""
    from transformers import CompileConfig

    # One query over 128 keys of SmolLM2: 131 us by scaled_dot_product_attention in bfloat16, 45 by two products.
    model.set_attn_implementation("eager")
    # Weights do not change between tokens: their guards are left out.
    options = {"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe}
    config: Any = CompileConfig(dynamic=False, mode=None, options=options)  # type: ignore[arg-type]
    config._compile_all_devices = True
    return config


def generate(path: Path, prompt: str, *, raw: bool, stream: bool, config_from: Path | None, **settings: Any) -> Answer:
    """Answer one prompt."""
    writer = Writer(path, config_from, **settings)
    answer = writer.answer([{"role": "user", "content": prompt}], raw=raw, stream=stream)
    if stream:
        print(f"[{answer.new_tokens} tokens, {answer.new_tokens / answer.seconds:.1f} a second]", file=sys.stderr)
    return answer


def chat(path: Path, *, as_json: bool, config_from: Path | None, **settings: Any) -> None:
    """Answer what stdin asks, each with all that was said before, until an empty line or the end."""
    writer = Writer(path, config_from, **settings)
    messages: list[dict[str, str]] = []
    while said := _ask():
        messages.append({"role": "user", "content": said})
        answer = writer.answer(messages, stream=not as_json)
        messages.append({"role": "assistant", "content": answer.text})
        if as_json:
            print(json.dumps(answer.as_json()), flush=True)


def _ask() -> str:
    """A line of stdin; "" at its end. The sign goes to stderr, so that stdout has the answers alone."""
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip()
