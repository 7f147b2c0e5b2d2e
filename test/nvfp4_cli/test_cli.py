"""The commands' arguments, exit statuses and errors, as a shell sees them."""

import importlib.util
import json
import subprocess
import sys

import click
import pytest
from click import shell_completion
from helpers.checkpoints import TINY, InMemory

import nvfp4_cli
from nvfp4_cli import nvfp4, options
from nvfp4_cli.completion import COMPLETION
from nvfp4_tensor import checkpoints
from nvfp4_tensor.checkpoints.checkpoint import format_named
from nvfp4_tensor.checkpoints.formats.gguf.format import DENSE_TYPES
from nvfp4_tensor.testing import selftest

COMMANDS = sorted(nvfp4.commands)


def test_choices_are_those_of_the_library():
    assert {*options.FORMATS, "dense", "mxfp4", "auto-round"} == set(checkpoints.FORMATS)  # which are sources
    assert options.DENSE_TYPES == DENSE_TYPES


@pytest.mark.parametrize("to", options.FORMATS)
def test_options_are_those_of_the_formats(to, tmp_path):
    """What the command line refuses before it starts is what a format does not know."""
    for i, option in enumerate(options.OPTIONS):
        given = {option: {"dense": "F32", "shard_bytes": 1 << 20, "tokenizer": None}.get(option, True)}
        known = True
        try:
            format_named(to).write(InMemory({}, TINY), tmp_path / f"{i}.safetensors", progress=False, **given)
        except ValueError as error:
            known = "no option" not in str(error)
        assert known == (to in options.OPTIONS[option]), option


def test_help_and_wrong_arguments_import_no_torch():
    """Its import takes more than a second, the rest a tenth of one."""
    helps = [[*command.split(), "--help"] for command in ("", *COMMANDS)]
    wrong = [["nonsense"], ["quantize", "not_there", "dst"], ["quantize", ".", "dst", "--gptq"], ["compare", "."]]
    code = (
        "import sys, nvfp4_cli\n"
        f"assert all(nvfp4_cli.main(each) == 0 for each in {helps})\n"
        f"assert all(nvfp4_cli.main(each) == 2 for each in {wrong})\n"
        "assert not {'torch', 'nvfp4_tensor', 'jinja2', 'tqdm'} & set(sys.modules), 'they import what commands need'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_command_has_help_with_an_example_and_json(run):
    assert " ".join(COMMANDS) == "chat compare completion convert demo generate info inspect quantize selftest"
    for command in ["", "quantize", "convert", "inspect", "compare", "generate", "chat"]:
        assert f"nvfp4 {command}" in run(*command.split(), "--help").partition("Options:")[0].split("\n", 1)[1]
    for name in COMMANDS:
        assert name == "completion" or any("--json" in parameter.opts for parameter in nvfp4.commands[name].params)


@pytest.mark.parametrize("error", [click.Abort(), KeyboardInterrupt(), KeyError("x")])
def test_interrupts_exit_130_and_faults_of_ours_keep_their_traceback(error, monkeypatch, capsys):
    def run(*args, **kwargs):
        raise error

    monkeypatch.setattr(nvfp4, "main", run)
    if isinstance(error, KeyError):
        with pytest.raises(KeyError):
            nvfp4_cli.main(["info"])
    else:
        assert nvfp4_cli.main(["info"]) == 130 and "interrupted" in capsys.readouterr().err


def test_a_traceback_on_request(monkeypatch, tmp_path):
    monkeypatch.setenv(nvfp4_cli.TRACEBACK, "1")
    with pytest.raises(ValueError, match="is not a checkpoint"):
        nvfp4_cli.main(["inspect", str(tmp_path)])


@pytest.mark.smoke
def test_info_names_versions_and_what_serves_each_device(run):
    out = run("info")
    assert "torch" in out and "CPU ops" in out and "CUDA ops" in out
    assert run("info", "--json")["versions"]["torch"] in out


@pytest.mark.parametrize("status", [0, 1])
def test_selftest_gives_its_exit_status(monkeypatch, capsys, status):
    monkeypatch.setattr(selftest, "main", lambda: status)
    assert nvfp4_cli.main(["selftest"]) == status
    check = selftest.Check("quantize", "rne", "cpu", 10, 3 * status)
    monkeypatch.setattr(selftest, "run", lambda: iter([check]))
    assert nvfp4_cli.main(["selftest", "--json"]) == status
    found = json.loads(capsys.readouterr().out)
    assert found["agree"] == (not status) and found["checks"][0]["differing"] == 3 * status


def test_demo_names_the_packages_it_misses(monkeypatch, run):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    error = run("demo", status=1)
    assert "transformers" in error and "nvfp4-tensor[demo]" in error


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["quantise", "a", "b"], "Did you mean 'quantize'"),
        (["quantize", "not_there", "dst"], "'not_there' does not exist"),
        (["inspect", "some/model-1B"], "hf download some/model-1B --local-dir model-1B and then give model-1B here"),
        (["quantize", ".", "dst", "--to", "onnx"], "'onnx' is not one of"),
        (["quantize", ".", "dst", "--gptq"], "give --calibrate TEXT"),
        (["quantize", ".", "dst", "--w4a16", "--calibrate", "text"], "add --gptq"),
        (["quantize", ".", "dst", "--bits", "5"], "give --calibrate TEXT"),
        (["quantize", ".", "dst", "--gptq", "--calibrate", "text", "--round-mode", "zero"], "leave out --round-mode"),
        (["quantize", ".", "dst", "--scale-search", "--four-over-six"], "give one of them"),
        (["quantize", ".", "dst", "--weighted"], "give --calibrate TEXT"),
        (["quantize", ".", "dst", "--weighted", "--calibrate", "text", "--gptq"], "neither --gptq nor"),
        (["quantize", ".", "dst", "--shard-size", "nan"], "is not a finite number"),
        (["quantize", ".", "dst", "--shard-size", "inf"], "is not in the range"),
        (["generate", ".", "hi", "--temperature", "nan"], "is not a finite number"),
        (["inspect", ".", "--html", "no/report.html"], "cannot be written"),
        (["compare", ".", ".", "--html", "."], "cannot be written"),
        (["quantize", ".", "dst", "--calibrate", "text", "--dense", "Q8_0"], "is for --to gguf, not for modelopt"),
        (["convert", ".", "dst", "--global-scale"], "--global-scale is for --to mlx"),
        (["convert", ".", "a.gguf", "--to", "gguf", "--no-quantize-activations"], "--quantize-activations is for --to"),
        (["convert", ".", "a.gguf", "--to", "gguf", "--shard-size", "1"], "--shard-size is for --to modelopt or"),
        (["quantize", ".", "dst", "--seed", str(2**63)], "is not in the range"),
        (["quantize", ".", "dst", "--seed", str(-(2**63) - 1)], "is not in the range"),
        (["quantize", ".", "dst.gguf"], "--to gguf?"),
        (["convert", ".", "dst.safetensors"], "--to comfy?"),
        (["convert", ".", "dst", "--to", "gguf"], "--to gguf writes one file: expected *.gguf, got dst"),
        (["compare", ".", ".", "--sweep", "3"], "give --text FILE"),
        (["completion", "csh"], "'csh' is not one of"),
    ],
)
def test_wrong_arguments_exit_2_and_say_how(arguments, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("some words")
    assert nvfp4_cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert said in captured.err and not captured.out


def test_completion(run):
    for shell in COMPLETION:
        assert f"_NVFP4_COMPLETE={shell}_source nvfp4" in run("completion", shell)
        assert shell_completion.get_completion_class(shell) is not None
    offers = {"qu": "quantize", "quantize --fo": "--four-over-six", "quantize a b --to mod": "modelopt"}
    for words, wanted in offers.items():
        *given, last = words.split()
        complete = shell_completion.ShellComplete(nvfp4, {}, "nvfp4", "_NVFP4_COMPLETE")
        assert wanted in [item.value for item in complete.get_completions(given, last)]
