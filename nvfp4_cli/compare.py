"""``nvfp4 compare``: how far one checkpoint is from another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nvfp4_cli import options
from nvfp4_cli.options import CHECKPOINT, TEXT
from nvfp4_cli.results import number, plain, prints_to_stderr, show, size_of, table

if TYPE_CHECKING:
    from nvfp4_tensor.checkpoints.comparison import Comparison, Layer
    from nvfp4_tensor.testing.model_quality import Quality


@click.command(short_help="Measure the errors of one checkpoint against another.")
@click.argument("a", type=CHECKPOINT)
@click.argument("b", type=CHECKPOINT)
@click.option("--text", type=TEXT, metavar="FILE", help="Run both on it: perplexity, KL of the logits, errors.")
@click.option("--tokens", default=4096, show_default=True, type=click.IntRange(2), help="Tokens of the text to use.")
@click.option("--window", default=512, show_default=True, type=click.IntRange(2), help="Tokens that see each other.")
@click.option("--batch", default=1, show_default=True, type=click.IntRange(1), help="Windows that run at a time.")
@click.option(
    "--sweep", default=0, metavar="N", type=click.IntRange(0, 64),
    help="With --text: perplexity with the most sensitive linears of B left as in A, at N points.",
)  # fmt: skip
@click.option("--worst", default=5, show_default=True, type=click.IntRange(0), help="How many blocks to list.")
@options.config_from
@options.summary
@options.html
@options.quiet
@options.as_json
def compare(
    a: Path, b: Path, text: Path | None, worst: int, summary: bool, html: Path | None, json_: bool, progress: bool,
    **given: Any,
) -> None:  # fmt: skip
    """Compare B, which is quantized, with A: the error and signal-to-noise ratio of each tensor, the worst blocks.

    With --text both models run: perplexity, Kullback-Leibler divergence of the logits, how often the most likely token
    is the same, and the error of each linear's output on the inputs that it has in A. With --sweep too: how many bits
    it takes to leave the worst linears dense, and the perplexity that it gives.

    \b
    nvfp4 compare SmolLM2 SmolLM2-NVFP4 --summary
    nvfp4 compare SmolLM2 SmolLM2-NVFP4 --text sample.txt --sweep 5 --html report.html
    """
    if given["sweep"] and text is None:
        raise click.UsageError("--sweep measures perplexity: give --text FILE too")
    if html is not None and text is not None and html.exists() and html.samefile(text):
        raise click.UsageError(f"--html would replace the text {text}: choose another name")
    with prints_to_stderr(json_):
        from nvfp4_tensor.checkpoints import comparison

        found = comparison.compare(a, b, worst=worst, progress=progress)
        quality, tokenizer = (None, "") if text is None else _run_models(a, b, text, progress=progress, **given)
        if html is not None:
            from nvfp4_cli.report import write_comparison

            write_comparison(html, a, b, found, HEAD, list(map(_cells, found.changed)), text, quality)
    if json_:
        of_text = None if quality is None else {"text": text, "tokenizer": tokenizer, **plain(quality)}
        rows: dict[str, Any] = {"layers": [], "worst": []} if summary else {}
        show({"a": a, "b": b, "bytes": (size_of(a), size_of(b)), **plain(found), **rows, "quality": of_text}, json_)
    else:
        lines = _summary(found) + (_quality_lines(text, tokenizer, quality) if text and quality else [])
        show("\n".join(lines if summary else [*lines, *_rows(found)]), json_)


def _run_models(
    a: Path, b: Path, text: Path, *, tokens: int, config_from: Path | None, progress: bool, **given: int
) -> tuple[Quality, str]:
    """Return what both models say of a text, and whose tokenizer has read it."""
    from nvfp4_tensor.checkpoints.models.opening import open_model, open_tokenizer, read_tokens
    from nvfp4_tensor.checkpoints.sources.reading import open_any
    from nvfp4_tensor.testing.model_quality import compare_models

    tokenizer = open_tokenizer(config_from, a, b)
    ids = read_tokens(text, tokenizer, tokens)
    with open_any(a) as first, open_any(b) as second:
        model_a = open_model(first, config_from, progress=progress)
        if config_from is None and b.suffix == ".safetensors":  # a single file has no configuration
            config_from = a
        model_b = open_model(second, config_from, progress=progress)
    quality = compare_models(model_a, model_b, ids, progress=progress, **given)
    return quality, f"{tokenizer.name_or_path}, {len(tokenizer)} tokens"


HEAD = ("tensor", "a / b", "bits of b", "error", "SNR dB", "largest", "clipped", "not finite")


def _cells(layer: Layer) -> tuple[str, ...]:
    """A row of the table."""
    snr = "identical" if layer.snr is None else f"{layer.snr:.2f}"
    errors = number(layer.relative), snr, number(layer.largest)
    return (layer.name, " / ".join(layer.kinds), f"{layer.bits:.2f}", *errors, str(layer.clipped), str(layer.bad))


def _summary(found: Comparison) -> list[str]:
    snr = "identical" if found.snr is None else f"SNR {found.snr:.2f} dB"
    same = len(found.layers) - len(found.changed)
    lines = [f"{len(found.changed)} tensors: error {number(found.relative)}, {snr}; {same} others are identical"]
    for here, names in (("a", found.only_in_a), ("b", found.only_in_b)):
        if names:
            lines.append(f"only in {here}: {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}")
    return lines


def _rows(found: Comparison) -> list[str]:
    lines = ["", table(HEAD, list(map(_cells, found.changed)))] if found.changed else []
    if found.worst:
        lines += ["", "worst blocks (error, error over the block's norm):"]
        lines += [f"  {b.error:.4g}  {b.relative:.3f}  {b.name} [{b.row}, {b.column}:]" for b in found.worst]
    return lines


def _quality_lines(text: Path, tokenizer: str, quality: Quality) -> list[str]:
    before, after = quality.perplexity
    lines = [
        f"{text.name}, {quality.tokens} tokens in {quality.windows} windows: perplexity {before:.3f} -> {after:.3f}, "
        f"KL {number(quality.divergence)} nats, the same most likely token at {quality.agreement:.1%}",
        f"tokenizer: {tokenizer}",
    ]
    if quality.outputs:
        lines.append("leave dense first, by the squared error that each bit removes (error of the output):")
        lines += [f"  {number(each.relative)}  {each.name}" for each in quality.outputs[:5]]
    for point in quality.sweep:
        lines.append(f"{point.dense_layers:>5} left dense: {point.bits:5.2f} bits, perplexity {point.perplexity:.3f}")
    return lines
