"""The Python of the README and of the guides runs as it stands: each file's blocks in order, in one namespace."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md", ROOT / "docs/index.md",
    *sorted(path for folder in ("guides", "reference") for path in (ROOT / "docs" / folder).glob("*.md")),
]  # fmt: skip
# What hub_kernels.md shows needs a repository that `make hub` builds: test/hub_kernel runs it.
FILES = [path for path in PAGES if "```python\n" in path.read_text() and path.name != "hub_kernels.md"]
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def python_of(text: str) -> str:
    """The blocks of Python alone, every line where it stands in the text, so that a traceback names the right one."""
    kept = [False] * (text.count("\n") + 1)
    for block in _BLOCK.finditer(text):
        first = text.count("\n", 0, block.start(1))
        kept[first : first + block.group(1).count("\n")] = [True] * block.group(1).count("\n")
    return "\n".join(line if keep else "" for line, keep in zip(text.split("\n"), kept, strict=True))


def test_lines_stay_where_they_are():
    assert python_of("# A\n```python\nx = 1\n```\nwords\n```sh\nls\n```\n```python\ny = 2\n```\n").split("\n") == [
        "", "", "x = 1", "", "", "", "", "", "", "y = 2", "", "",
    ]  # fmt: skip


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_blocks_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = python_of(path.read_text())
    for module in ("transformers", "accelerate", "peft", "gguf") if re.search("transformers|peft", code) else ():
        pytest.importorskip(module)
    if "from diffusers" in code:
        pytest.importorskip("diffusers")
    if '"your/model"' in code:
        from helpers.tiny_models import tiny_model

        tiny_model("Llama", quantized=False).save_pretrained(tmp_path / "your" / "model")
    exec(compile(code, str(path), "exec"), {"__name__": "__main__"})
