"""``nvfp4 generate`` and ``nvfp4 chat``: text from a model."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nvfp4_cli import options
from nvfp4_cli.options import CHECKPOINT
from nvfp4_cli.results import plain, show

if TYPE_CHECKING:
    from torch import Tensor

_generates = options.together(
    click.option("--max-new-tokens", default=128, show_default=True, type=click.IntRange(1)),
    click.option(
        "--temperature", default=0.0, show_default=True, type=options.Finite(0), help="0 selects the most likely token."
    ),
    click.option("--seed", default=0, show_default=True, type=options.SEED, help="Seed of sampling."),
    options.config_from,
    options.as_json,
)
"""The options that ``generate`` and ``chat`` share."""


@click.command(short_help="Answer a prompt.")
@click.argument("path", type=CHECKPOINT)
@click.argument("prompt")
@click.option("--raw", is_flag=True, help="Continue the prompt, without the model's chat template.")
@_generates
def generate(path: Path, prompt: str, json_: bool, raw: bool, **given: Any) -> None:
    """Let a model, quantized or not, answer PROMPT ("-" reads it from stdin).

    \b
    nvfp4 generate SmolLM2-NVFP4 "What is the capital of France?"
    nvfp4 generate model.gguf "Once upon a time" --raw --temperature 0.8 --seed 3
    """
    content = sys.stdin.read() if prompt == "-" else prompt
    answer = Writer(path, **given).answer([{"role": "user", "content": content}], raw=raw, stream=not json_)
    if json_:
        show(answer.as_json(), json_)
    else:
        rate = answer.new_tokens / answer.seconds
        click.echo(f"[{answer.new_tokens} tokens, {rate:.1f} per second]", err=True)


@click.command(short_help="Talk with a model.")
@click.argument("path", type=CHECKPOINT)
@_generates
def chat(path: Path, json_: bool, **given: Any) -> None:
    """Talk with a model until an empty line or the end of the input. With --json each answer is one line of JSON.

    \b
    nvfp4 chat SmolLM2-NVFP4
    """
    writer = Writer(path, **given)
    messages: list[dict[str, str]] = []
    while prompt := _ask():
        messages.append({"role": "user", "content": prompt})
        answer = writer.answer(messages, stream=not json_)
        messages.append({"role": "assistant", "content": answer.text})
        if json_:
            print(json.dumps(answer.as_json()), flush=True)


def _ask() -> str:
    """A line of stdin, "" at its end. The prompt sign goes to stderr, because stdout is for answers."""
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip()


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
        self, path: Path, config_from: Path | None, *, max_new_tokens: int, temperature: float, seed: int
    ) -> None:
        import torch

        from nvfp4_tensor.checkpoints.models.opening import open_model, open_tokenizer
        from nvfp4_tensor.generation import decode_natively

        self.tokenizer: Any = open_tokenizer(config_from, path)
        self.model: Any = open_model(path, config_from)
        with contextlib.suppress(TypeError, ValueError):  # other weights and families: transformers' own forward
            decode_natively(self.model)  # type: ignore[arg-type]
        self.settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
        if temperature > 0:
            self.settings["temperature"] = temperature
        else:  # without them, transformers warns of a checkpoint's own settings of sampling
            self.settings.update(temperature=None, top_p=None, top_k=None)
        torch.manual_seed(seed)

    def tokens(self, messages: list[dict[str, str]], raw: bool) -> Tensor:
        """Tokens of the messages, (1, tokens), by the model's chat template if it has one and ``raw`` is False."""
        is_plain = raw or not self.tokenizer.chat_template
        if is_plain:
            text = "\n".join(message["content"] for message in messages)
        else:  # templates write the token that begins a text themselves
            text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids: Tensor = self.tokenizer(text, add_special_tokens=is_plain, return_tensors="pt").input_ids
        if not ids.numel():
            raise ValueError("the prompt is empty: give some text")
        return ids

    def answer(self, messages: list[dict[str, str]], *, raw: bool = False, stream: bool) -> Answer:
        """Continue the messages; ``stream`` prints the text while it is generated."""
        ids = self.tokens(messages, raw)
        streamer = None
        if stream:
            from transformers import TextStreamer

            streamer = TextStreamer(self.tokenizer, skip_prompt=not raw, skip_special_tokens=True)
        start = time.perf_counter()
        written = self.model.generate(
            ids, attention_mask=ids.new_ones(ids.shape), streamer=streamer,
            pad_token_id=self.tokenizer.eos_token_id or 0, **self.settings,
        )[0, ids.shape[1] :]  # fmt: skip
        seconds = time.perf_counter() - start
        text = self.tokenizer.decode(written, skip_special_tokens=True)
        return Answer(messages[-1]["content"], text, ids.shape[1], len(written), seconds)
