"""The commands and their arguments, by click; no torch up here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from nvfp4_cli import options
from nvfp4_cli.options import CHECKPOINT, NEW, TEXT, prints_to_stderr, show, take_options_of_format, wants_bar

COMPLETION = {
    "bash": 'eval "$(_NVFP4_COMPLETE=bash_source nvfp4)"  # at the end of ~/.bashrc',
    "zsh": 'eval "$(_NVFP4_COMPLETE=zsh_source nvfp4)"  # at the end of ~/.zshrc',
    "fish": "_NVFP4_COMPLETE=fish_source nvfp4 | source  # in ~/.config/fish/completions/nvfp4.fish",
}
SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.group(context_settings=SETTINGS, no_args_is_help=True)
@click.version_option(package_name="nvfp4-tensor", prog_name="nvfp4")
def nvfp4() -> None:
    """NVFP4 checkpoints: quantize, convert, look into them, compare, run.

    \b
    nvfp4 quantize Llama-3.2-1B Llama-3.2-1B-NVFP4 --four-over-six
    nvfp4 inspect Llama-3.2-1B-NVFP4 --html report.html
    nvfp4 compare Llama-3.2-1B Llama-3.2-1B-NVFP4 --text sample.txt
    nvfp4 convert Llama-3.2-1B-NVFP4 model.gguf --to gguf
    nvfp4 generate Llama-3.2-1B-NVFP4 "Why is the sky blue?"

    Exit status: 0 done, 1 it could not be done (stderr says why), 2 wrong arguments, 130 interrupted.
    """


@nvfp4.command(short_help="Quantize a folder of safetensors, or a GGUF.")
@click.argument("src", type=CHECKPOINT)
@click.argument("dst", type=NEW)
@options.to
@click.option(
    "--round-mode", type=click.Choice(["rne", "away", "zero", "stochastic"]), default="rne", show_default=True,
    help="To nearest (ties to even, away from zero, toward zero), or stochastically.",
)  # fmt: skip
@click.option(
    "--four-over-six", type=click.Choice(["mse", "mae"]), is_flag=False, flag_value="mse",
    help="Map each block's largest number to 6 or to 4, whichever errs less.",
)  # fmt: skip
@click.option("--scale-search", is_flag=True, help="Search each block's scale: errs least, takes longer.")
@click.option("--w4a16", is_flag=True, help="Weights alone: the default, but for --calibrate.")
@click.option("--exclude", multiple=True, metavar="PATTERN", help='Leave dense: "*.down_proj", "re:.*layers.0.*".')
@click.option("--include", multiple=True, metavar="PATTERN", help='Quantize what stays dense by default: "lm_head".')
@click.option("--head", is_flag=True, help="The output layer too; a copy, where it is the embedding's weight.")
@click.option("--calibrate", type=TEXT, metavar="TEXT", help="Run the model over a text file to learn its inputs.")
@click.option("--gptq", is_flag=True, help="With --calibrate: fit the weights to these inputs (W4A16).")
@click.option("--weighted", is_flag=True, help="With --calibrate: search scales for these inputs (W4A16); sooner.")
@click.option(
    "--bits",
    type=options.Finite(4.5, 16, max_open=True),
    help="With --calibrate: leave dense what costs most on the text, up to so many bits over all linears.",
)
@click.option("--tokens", default=4096, show_default=True, type=click.IntRange(2), help="Of the calibration.")
@click.option("--seed", default=0, show_default=True, type=options.SEED, help="Of stochastic rounding.")
@options.of_format
@options.quiet
@options.as_json
def quantize(dst: Path, json_: bool, quiet: bool, **given: Any) -> None:
    """Quantize SRC, a folder of safetensors or a GGUF, into DST.

    Weights alone become NVFP4 (W4A16); with --calibrate what they are multiplied by does too (W4A4), by fixed scales
    that the model's inputs over TEXT have. Without a calibration no model is built, and memory stays under 2 GB.
    Embeddings, output layers and routers stay dense. An interrupted run is taken up by the same command.

    \b
    nvfp4 quantize SmolLM2 SmolLM2-NVFP4 --four-over-six
    nvfp4 quantize SmolLM2 SmolLM2.gguf --to gguf --scale-search --dense Q8_0
    nvfp4 quantize SmolLM2 SmolLM2-W4A4 --to compressed-tensors --calibrate sample.txt
    nvfp4 quantize SmolLM2 SmolLM2-GPTQ --calibrate sample.txt --gptq
    nvfp4 quantize SmolLM2 SmolLM2-weighted --calibrate sample.txt --weighted
    nvfp4 quantize SmolLM2 SmolLM2-5-bits --calibrate sample.txt --bits 5 --w4a16 --four-over-six
    nvfp4 quantize SmolLM2.Q4_K_M.gguf SmolLM2-NVFP4 --exclude "*.down_proj"
    """
    if given["gptq"] and given["calibrate"] is None:
        raise click.UsageError("--gptq fits the weights to sample text: give --calibrate TEXT too")
    if given["weighted"] and (given["calibrate"] is None or given["gptq"] or given["four_over_six"]):
        raise click.UsageError(
            "--weighted searches scales by what sample text feeds: give --calibrate TEXT too, and neither --gptq nor "
            "--four-over-six"
        )
    if given["bits"] is not None and given["calibrate"] is None:
        raise click.UsageError("--bits weighs layers by what they cost on sample text: give --calibrate TEXT too")
    if given["w4a16"] and given["calibrate"] is not None and not (given["gptq"] or given["weighted"] or given["bits"]):
        raise click.UsageError(
            "--calibrate learns scales of activations, which --w4a16 leaves alone: drop one, or add --gptq, --weighted "
            "or --bits"
        )
    options.check_ending(dst, given["to"])
    of_format = take_options_of_format(given, given["to"])
    from nvfp4_tensor.cli.quantize import quantize as run

    with prints_to_stderr(json_):
        result = run(dst=dst, progress=wants_bar(quiet), options=of_format, **given)
    show(result, json_)


@nvfp4.command(short_help="Write an NVFP4 checkpoint in another format.")
@click.argument("src", type=CHECKPOINT)
@click.argument("dst", type=NEW)
@options.to
@click.option("--w4a16", is_flag=True, help="Leave out the quantization of activations.")
@options.of_format
@options.quiet
@options.as_json
def convert(src: Path, dst: Path, to: str, w4a16: bool, quiet: bool, json_: bool, **given: Any) -> None:
    """Write the NVFP4 checkpoint SRC in another format: the same codes and scales, nothing is rounded.

    \b
    nvfp4 convert SmolLM2-NVFP4 SmolLM2.gguf --to gguf
    nvfp4 convert nvidia-NVFP4 for-mlx --to mlx --w4a16 --lossy
    nvfp4 convert flux-NVFP4 flux.safetensors --to comfy --quantize-activations
    """
    options.check_ending(dst, to)
    of_format = take_options_of_format(given, to)
    from nvfp4_tensor.cli.convert import convert as run

    with prints_to_stderr(json_):
        result = run(src, dst, to=to, weight_only=w4a16, progress=wants_bar(quiet), options=of_format)
    show(result, json_)


@nvfp4.command(short_help="Bits, scales, clipped and NaN blocks.")
@click.argument("path", type=CHECKPOINT)
@click.option("--all", "every", is_flag=True, help="Every tensor, dense ones too, not the quantized alone.")
@options.html
@options.quiet
@options.as_json
def inspect(path: Path, every: bool, html: Path | None, quiet: bool, json_: bool) -> None:
    """What a checkpoint holds: format, bits a weight, range of scales, blocks that are clipped, zero or NaN.

    A block counts as clipped when its scale is 448, the largest there is: what was larger has been cut off, or just
    fits. One of these a per-tensor scale is what NVIDIA's rule makes.

    \b
    nvfp4 inspect SmolLM2-NVFP4
    nvfp4 inspect model.gguf --html report.html
    nvfp4 inspect SmolLM2-NVFP4 --json | jq .total
    """
    from nvfp4_tensor.cli.inspect import inspect as run

    with prints_to_stderr(json_):
        result = run(path, every=every, progress=wants_bar(quiet))
        if html is not None:
            from nvfp4_tensor.cli.report import write_inspection

            write_inspection(html, result)
    show(result, json_)


@nvfp4.command(short_help="Errors of one checkpoint beside another.")
@click.argument("a", type=CHECKPOINT)
@click.argument("b", type=CHECKPOINT)
@click.option("--text", type=TEXT, metavar="FILE", help="Run both over it: perplexity, KL of the logits, errors.")
@click.option("--tokens", default=4096, show_default=True, type=click.IntRange(2), help="Of the text, at most.")
@click.option("--window", default=512, show_default=True, type=click.IntRange(2), help="Tokens that see each other.")
@click.option(
    "--sweep", default=0, metavar="N", type=click.IntRange(0, 64),
    help="With --text: perplexity with the most sensitive layers of B left as in A, at N points.",
)  # fmt: skip
@click.option("--worst", default=5, show_default=True, type=click.IntRange(0), help="How many blocks to list.")
@options.config_from
@options.html
@options.quiet
@options.as_json
def compare(a: Path, b: Path, html: Path | None, json_: bool, quiet: bool, **given: Any) -> None:
    """How far B, quantized, is from A: error and signal-to-noise of each layer, the worst blocks.

    With --text both models run: perplexity, Kullback-Leibler divergence of the logits, how often they agree, and the
    error of each layer's output on its true inputs. With --sweep too, what leaving the worst layers dense would cost
    in bits and gain in perplexity.

    \b
    nvfp4 compare SmolLM2 SmolLM2-NVFP4
    nvfp4 compare SmolLM2 SmolLM2-NVFP4 --text sample.txt --sweep 5 --html report.html
    """
    if given["sweep"] and given["text"] is None:
        raise click.UsageError("--sweep measures perplexity: give --text FILE too")
    from nvfp4_tensor.cli.compare import compare as run

    with prints_to_stderr(json_):
        result = run(a, b, progress=wants_bar(quiet), **given)
        if html is not None:
            from nvfp4_tensor.cli.report import write_comparison

            write_comparison(html, result)
    show(result, json_)


def _writes(command: Any) -> Any:
    """The options of what writes text."""
    decorators: tuple[Callable[[Any], Any], ...] = (
        options.as_json,
        options.config_from,
        click.option(
            "--compile", "compiled", is_flag=True,
            help="Compile the model first: a minute once, then faster. For long answers; needs a C++ compiler.",
        ),
        click.option("--seed", default=0, show_default=True, type=options.SEED, help="Of sampling."),
        click.option(
            "--temperature", default=0.0, show_default=True, type=options.Finite(0),
            help="0 takes the likeliest token.",
        ),
        click.option("--max-new-tokens", default=128, show_default=True, type=click.IntRange(1)),
    )  # fmt: skip
    for decorator in decorators:
        command = decorator(command)
    return command


@nvfp4.command(short_help="Let a model answer a prompt.")
@click.argument("path", type=CHECKPOINT)
@click.argument("prompt")
@click.option("--raw", is_flag=True, help="The prompt as it is, without the model's chat template.")
@_writes
def generate(path: Path, prompt: str, json_: bool, **given: Any) -> None:
    """Let a model, quantized or not, answer PROMPT ("-" reads it from stdin).

    \b
    nvfp4 generate SmolLM2-NVFP4 "What is the capital of France?"
    nvfp4 generate model.gguf "Once upon a time" --raw --temperature 0.8 --seed 3
    """
    from nvfp4_tensor.cli.generate import generate as run

    if prompt == "-":
        prompt = sys.stdin.read()
    result = run(path, prompt, stream=not json_, **given)
    if json_:
        show(result, json_)


@nvfp4.command(short_help="Talk with a model.")
@click.argument("path", type=CHECKPOINT)
@_writes
def chat(path: Path, json_: bool, **given: Any) -> None:
    """Talk with a model; an empty line or the end of the input ends it. With --json each answer is one line of JSON.

    \b
    nvfp4 chat SmolLM2-NVFP4
    """
    from nvfp4_tensor.cli.generate import chat as run

    run(path, as_json=json_, **given)


@nvfp4.command(short_help="What is installed, what serves which device.")
@options.as_json
def info(json_: bool) -> None:
    """What is installed, and which kernels serve which device."""
    from nvfp4_tensor.cli.machine import installed

    show(installed(), json_)


@nvfp4.command(short_help="Every kernel here against the reference.")
@options.as_json
def selftest(json_: bool) -> int:
    """Every kernel on this machine against the reference; exit status 1 if one differs."""
    from nvfp4_tensor.cli.machine import checks
    from nvfp4_tensor.testing import selftest as kernels

    if not json_:
        return kernels.main()
    result = checks()
    show(result, json_)
    return result.status


@nvfp4.command(short_help="A real model: a table and a picture.")
@click.option("--output", type=NEW, default=Path("demo_output"), show_default=True, help="Folder for the results.")
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@options.as_json
def demo(output: Path, device: str, json_: bool) -> None:
    """A real model in NVFP4: a table, a round through a checkpoint, a picture of stochastic rounding."""
    from nvfp4_tensor.cli.machine import DemoResult, check_demo_packages

    check_demo_packages()
    from nvfp4_tensor.cli import demo as program

    with prints_to_stderr(json_):
        rows = program.run(output, device)
    if json_:
        show(DemoResult(rows), json_)


@nvfp4.command(short_help="Completion for bash, zsh or fish.")
@click.argument("shell", type=click.Choice(sorted(COMPLETION)))
def completion(shell: str) -> None:
    """How SHELL learns to complete nvfp4's commands, options and paths: a line for its settings."""
    click.echo(COMPLETION[shell])
