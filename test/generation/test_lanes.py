"""Run attention to codes of Hopper's kernel of all layers on a CPU, lane by lane, and compare it with float64.

No GPU is needed: the headers are compiled for the host, with stand-ins for what PTX and the other headers have.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CUDA = Path(__file__).parents[2] / "nvfp4_tensor/csrc/cuda"
LANES = Path(__file__).parent / "lanes"
HEADERS = {
    "attention/pairs.cuh": ("using Bf16", "// Two packed elements"),
    "attention/coded_tile.cuh": ("// A warp's copies from memory", "// Of a token's codes and scales"),
    "attention/warp.cuh": (),
    "generation/layers_sm90/attention.cuh": (),
    "generation/layers_sm90/coded_attention.cuh": (),
}
"""Each with the beginning and the end of a part that the stand-ins have."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux" or shutil.which("g++") is None, reason="needs g++ and Linux's fibers"),
]


def host_text(name):
    """Return a header without its directives, and with instructions as calls."""
    text = (CUDA / name).read_text()
    if HEADERS[name]:
        begin, end = (text.index(part) for part in HEADERS[name])
        text = text[:begin] + text[end:]
    text = re.sub(r"^#(include|pragma|if|endif).*$|__builtin_assume\(.*\);$", "", text, flags=re.MULTILINE)
    store = r'asm volatile\("st\.shared\.u32 \[%0\], %1;" ::"r"\((.*?)\), "r"\(([^()]*)\)\s*: "memory"\);'
    text = re.sub(store, r"store_shared<uint32_t>(\1, \2);", text, flags=re.DOTALL)
    store = r'asm volatile\("st\.shared\.v2\.f32 [^"]*" ::"r"\((.*?)\), "f"\(both\.x\), "f"\(both\.y\)\s*: "memory"\);'
    text = re.sub(store, r"store_shared(\1, both);", text, flags=re.DOTALL)
    assert "asm" not in text, f"{name} has an instruction without a stand-in"
    return text


def run(folder, sources):
    (folder / "sources.h").write_text(sources)
    program = folder / "coded_attention"
    command = ["g++", "-std=c++20", "-O1", "-w", f'-DSOURCES="{folder}/sources.h"', f"-I{LANES}"]
    subprocess.run([*command, str(LANES / "coded_attention.cpp"), "-o", str(program)], check=True)
    return subprocess.run([str(program)], capture_output=True, text=True, timeout=300)


def sources():
    return "\n".join(host_text(name) for name in HEADERS)


def test_coded_attention(tmp_path):
    result = run(tmp_path, sources())
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(": 0 wrong") == result.stdout.count("\n") == 28


@pytest.mark.exhaustive
@pytest.mark.parametrize(("right", "wrong"), [
    ("if (g + i / 2 * 8 >= rest) scores", "if (g + i / 2 * 8 > rest) scores"),  # one token more
    ("int row = slot + 1 + token - s.front;", "int row = slot + token - s.front;"),  # the ring's oldest left out
    ("begin = has_dense ? 0 : first + (split - 1) * each;", "begin = has_dense ? 0 : (split - 1) * each;"),
    ("mine.total[0][i] = load_shared_float(scratch.maximum(warp, row) + 4);", ";"),  # dense tokens uncounted
], ids=["mask", "ring", "share", "total"])  # fmt: skip
def test_a_planted_error_is_found(right, wrong, tmp_path):
    text = sources()
    assert text.count(right) == 1
    assert run(tmp_path, text.replace(right, wrong)).returncode != 0
