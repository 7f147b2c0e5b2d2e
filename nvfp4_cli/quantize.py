"""``nvfp4 quantize``: dense weights to NVFP4, optionally calibrated on text."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from nvfp4_cli import options
from nvfp4_cli.convert import Written
from nvfp4_cli.options import CHECKPOINT, NEW, TEXT
from nvfp4_cli.results import prints_to_stderr, show, writes

FOUR_OVER_SIX, ERRORS = "--four-over-six", ("mse", "mae")
WINDOW = 512
"""Tokens of the calibration text that see each other."""
WINDOWS_PER_STEP = {"cuda": 32, "cpu": 4}
"""Windows of the text that one step of --distill trains on."""


class _Quantize(click.Command):
    """A command whose --four-over-six takes the next argument only if it is a value of it, and not SRC."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        options = args[: args.index("--")] if "--" in args else args
        for i, option in enumerate(options):
            if option == FOUR_OVER_SIX and options[i + 1 : i + 2] not in ([each] for each in ERRORS):
                args[i] = f"{option}={ERRORS[0]}"
        return super().parse_args(ctx, args)


@click.command(cls=_Quantize, short_help="Quantize a folder of safetensors, or a GGUF.")
@click.argument("src", type=CHECKPOINT)
@click.argument("dst", type=NEW)
@options.to
@click.option(
    "--round-mode", type=click.Choice(["rne", "away", "zero", "stochastic"]), default="rne", show_default=True,
    help="To nearest, with ties to even, away from zero or toward zero; or stochastically.",
)  # fmt: skip
@click.option(
    FOUR_OVER_SIX, type=click.Choice(ERRORS), is_flag=False, flag_value=ERRORS[0],
    help="Map each block's largest number to 6 or to 4, whichever has the smaller error.",
)  # fmt: skip
@click.option("--scale-search", is_flag=True, help="Search each block's scale: smallest error, slower.")
@click.option("--w4a16", is_flag=True, help="Quantize weights only. This is the default without --calibrate.")
@click.option("--exclude", multiple=True, metavar="PATTERN", help='Leave dense: "*.down_proj", "re:.*layers.0.*".')
@click.option("--include", multiple=True, metavar="PATTERN", help='Quantize what is dense by default: "lm_head".')
@click.option("--head", is_flag=True, help="Quantize the output layer too, or a copy if it is the embedding's weight.")
@click.option("--calibrate", type=TEXT, metavar="TEXT", help="Run the model on a text file to find its inputs.")
@click.option("--gptq", is_flag=True, help="With --calibrate: fit the weights to these inputs (W4A16).")
@click.option("--weighted", is_flag=True, help="With --calibrate: search scales for these inputs (W4A16); faster.")
@click.option(
    "--bits", type=options.Finite(4.5, 16, max_open=True),
    help="With --calibrate: leave the most sensitive linears dense, for this average over all linears.",
)  # fmt: skip
@click.option(
    "--distill", type=options.TextOrSelf(exists=True, dir_okay=False, path_type=Path), metavar="TEXT|self",
    help="Train the quantized model on a text to give the dense model's logits; self: on text that the model writes.",
)  # fmt: skip
@click.option("--minutes", type=options.Finite(0, min_open=True), help="With --distill: of training; 10 by default.")
@click.option(
    "--tokens", type=click.IntRange(2),
    help="Tokens of TEXT to use: 4096 by default; with --distill 10 million, or of the model's own 65536, on a GPU "
    "1048576.",
)  # fmt: skip
@click.option(
    "--compile", "compile_", is_flag=True, help="With --distill: compile the model's blocks by torch.compile."
)
@click.option("--seed", default=0, show_default=True, type=options.SEED, help="Seed of stochastic rounding.")
@options.of_format
@options.quiet
@options.as_json
def quantize(src: Path, dst: Path, to: str, json_: bool, **given: Any) -> None:
    """Quantize SRC, a folder of safetensors or a GGUF, into DST.

    By default only weights are quantized (W4A16). --calibrate quantizes activations too (W4A4), with fixed scales for
    the inputs that the model has on TEXT. Without it no model is built, and memory stays under 2 GB. Embeddings, output
    layers and routers stay dense. To resume an interrupted run, give the same command again.

    \b
    nvfp4 quantize SmolLM2 SmolLM2-NVFP4 --four-over-six
    nvfp4 quantize SmolLM2 SmolLM2.gguf --to gguf --scale-search --dense Q8_0
    nvfp4 quantize SmolLM2 SmolLM2-W4A4 --to compressed-tensors --calibrate sample.txt
    nvfp4 quantize SmolLM2 SmolLM2-GPTQ --calibrate sample.txt --gptq
    nvfp4 quantize SmolLM2 SmolLM2-weighted --calibrate sample.txt --weighted
    nvfp4 quantize SmolLM2 SmolLM2-5-bits --calibrate sample.txt --bits 5 --w4a16 --four-over-six
    nvfp4 quantize SmolLM2 SmolLM2-W4A4 --distill sample.txt --minutes 10
    nvfp4 quantize SmolLM2.Q4_K_M.gguf SmolLM2-NVFP4 --exclude "*.down_proj"
    """
    _check_together(**given)
    of_format = options.take_options_of_format(given, to, dst)
    with prints_to_stderr(json_), writes(dst):
        result = run(src, dst, to=to, of_format=of_format, **given)
    show(result, json_)


def _check_together(
    *, calibrate: Path | None, gptq: bool, weighted: bool, bits: float | None, w4a16: bool, four_over_six: str | None,
    scale_search: bool, round_mode: str, distill: Path | str | None, minutes: float | None,
    compile_: bool, **others: Any,
) -> None:  # fmt: skip
    wrong = {
        f"--distill rounds to nearest: leave out --round-mode {round_mode}": distill and round_mode != "rne",
        "--distill finds scales and weights itself: leave out --calibrate, --gptq, --weighted and --bits":
            distill and (calibrate or gptq or weighted or bits),
        "--minutes and --compile are for --distill TEXT: give that too": (minutes or compile_) and not distill,
        f"--gptq rounds to nearest: leave out --round-mode {round_mode}": gptq and round_mode != "rne",
        "--scale-search has the choices of --four-over-six and more: give one of them": scale_search and four_over_six,
        "--gptq needs sample text: give --calibrate TEXT too": gptq and not calibrate,
        "--weighted needs sample text: give --calibrate TEXT too": weighted and not calibrate,
        "--bits needs sample text: give --calibrate TEXT too": bits and not calibrate,
        "--calibrate finds scales for activations, and --w4a16 leaves activations dense: give one of them, or add "
        "--gptq, --weighted or --bits": calibrate and w4a16 and not (gptq or weighted or bits),
        "--weighted chooses the scales itself: give neither --gptq nor --four-over-six with it":
            weighted and (gptq or four_over_six),
    }  # fmt: skip
    for message, is_wrong in wrong.items():
        if is_wrong:
            raise click.UsageError(message)


def run(
    src: Path, dst: Path, *, to: str, round_mode: str, four_over_six: str | None, scale_search: bool, w4a16: bool,
    exclude: Sequence[str], include: Sequence[str], head: bool, calibrate: Path | None, gptq: bool, weighted: bool,
    bits: float | None, distill: Path | str | None, minutes: float | None, compile_: bool,
    tokens: int | None, seed: int, progress: bool, of_format: Mapping[str, Any],
) -> Written:  # fmt: skip
    """Quantize ``src`` into ``dst``; the arguments are the options of the command."""
    from nvfp4_tensor import NVFP4Config, NVFP4WeightOnlyConfig, QuantizeSpec, checkpoints
    from nvfp4_tensor.checkpoints.checkpoint import format_named
    from nvfp4_tensor.checkpoints.io.resumable_write import check_is_new
    from nvfp4_tensor.checkpoints.models import fitting
    from nvfp4_tensor.checkpoints.models.opening import open_model, open_tokenizer, read_tokens, untie_head, windows_of
    from nvfp4_tensor.checkpoints.sources.reading import open_source
    from nvfp4_tensor.quantization.observed_experts import routed_tokens
    from nvfp4_tensor.testing.model_quality import compare_models

    how: dict[str, Any] = {"round_mode": round_mode, "four_over_six": four_over_six, "scale_search": scale_search}
    spec = QuantizeSpec(**how)
    given: dict[str, Any] = {"weight_spec": spec, "seed": seed if spec.is_stochastic else None}
    start = time.perf_counter()
    amax = budget = routed = None
    if distill is not None or calibrate is not None:
        check_is_new(dst, is_file=format_named(to).is_file)  # before minutes of calibration
        source, fits = open_source(src), distill is not None or gptq or weighted
        source.check_values()
        if fits:
            fitting.check_scales_fit(source, to, of_format)
        batches = windows_of(read_tokens(calibrate, open_tokenizer(src), tokens or 4096), WINDOW) if calibrate else []
        model = open_model(source, progress=progress)
        included = (*include, untie_head(model)) if head else include
        chosen = fitting.Chosen(model, exclude, included, to)
        if bits is not None:
            config = (NVFP4WeightOnlyConfig if gptq or weighted or w4a16 else NVFP4Config)(**given)
            budget = fitting.spend_bits(model, batches, bits, config, chosen, progress=progress)
            exclude = (*exclude, *chosen.patterns(budget.left_dense))
            chosen = fitting.Chosen(model, exclude, included, to)
        if distill is not None:
            batches = training_batches(model, distill, src, tokens, progress=progress)
            state = dst.with_name(f"{dst.name}.distill")  # from which an interrupted run resumes
            fitting.fit_by_distillation(
                model, batches, spec, chosen, w4a16=w4a16, minutes=minutes or 10.0, compile=compile_, folder=state,
                progress=progress,
            )  # fmt: skip
        elif fits:
            config = NVFP4WeightOnlyConfig(**given)
            fitting.fit_to_inputs(model, batches, config, chosen, by_gptq=gptq, progress=progress)
        if fits:
            fitting.write_fitted(source, model, dst, to=to, head=head, progress=progress, **of_format)
            written = Written.of(src, dst, time.perf_counter() - start, budget, routed_tokens(model))
            if distill is None:
                return written
            shutil.rmtree(state)
            dense = open_model(open_source(src), progress=progress)
            again = open_model(dst, src, progress=progress)
            read = compare_models(dense, again, batches[0].cpu().flatten(), progress=progress)
            return dataclasses.replace(written, divergence=read.divergence)
        amax = None if w4a16 else fitting.find_input_amax(model, batches, chosen, progress=progress)
        routed = routed_tokens(model)
        source.check_unchanged()  # since the model was loaded
        source.close()
        del model
    checkpoints.quantize(
        src, dst, to=to, spec=spec, exclude=exclude, include=include, quantize_lm_head=head, input_amax=amax, seed=seed,
        progress=progress, **of_format,
    )  # fmt: skip
    return Written.of(src, dst, time.perf_counter() - start, budget, routed)


def training_batches(model: Any, text: Path | str, src: Path, tokens: int | None, *, progress: bool) -> list[Any]:
    """Return windows of a text, or of one that the model writes, some at a time, and move the model to a GPU."""
    import torch
    from tqdm import tqdm

    from nvfp4_tensor.checkpoints.models.opening import open_tokenizer, read_tokens, windows_of
    from nvfp4_tensor.quantization import generate_calibration_text

    on_gpu = torch.cuda.is_available()
    model.to("cuda" if on_gpu else "cpu")
    count = WINDOWS_PER_STEP["cuda" if on_gpu else "cpu"]
    if text == "self":
        tokenizer = None
        with contextlib.suppress(ValueError):  # without one it writes no conversations
            tokenizer = open_tokenizer(src)
        tokens = tokens or (1 << 20 if on_gpu else 1 << 16)
        known = tokens <= 1 << 16 and getattr(tokenizer, "chat_template", None) is None
        with tqdm(total=WINDOW - 1 if known else None, desc="writing text", unit="token", disable=not progress) as bar:
            hook = model.register_forward_hook(lambda *_: bar.update() and None)
            windows = generate_calibration_text(model, tokens, window=WINDOW, tokenizer=tokenizer)
            hook.remove()
        return list(torch.cat(windows).split(count))
    ids = read_tokens(Path(text), open_tokenizer(src), tokens or 10_000_000)
    return windows_of(ids.to(model.device), WINDOW, count)
