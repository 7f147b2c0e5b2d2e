"""Test that docs/verified.md names, for each operator and device, what serves it: a native kernel or plain torch."""

import importlib
import re
from pathlib import Path

import pytest
import torch

from nvfp4_tensor.ops import native

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| `(\w+)` \| (native|plain) \| (native|plain) \| *(.*?) *\|$", re.MULTILINE)
IMPLEMENTATIONS = re.compile(r"STABLE_TORCH_LIBRARY_IMPL\(NVFP4_OPS, (\w+), m\) \{(.*?)\n\}", re.DOTALL)


def native_ops(device):
    """Those of the table's column."""
    rows = ROW.findall((ROOT / "docs/verified.md").read_text())
    return {name for name, cpu, cuda, _ in rows if {"CPU": cpu, "CUDA": cuda}[device] == "native"}


def test_each_operator_has_one_row_and_plain_torch_a_reason():
    importlib.import_module("nvfp4_tensor.training.linear.grouped")  # the only room beside ops that defines operators
    rows = ROW.findall((ROOT / "docs/verified.md").read_text())
    schemas = torch._C._jit_get_all_schemas()
    operators = {each.name.removeprefix("nvfp4::") for each in schemas if each.name.startswith("nvfp4::")}
    assert sorted(name for name, *_ in rows) == sorted(operators)
    assert all(("plain" in (cpu, cuda)) == bool(why) for _, cpu, cuda, why in rows)


@pytest.mark.parametrize("device", ["CPU", "CUDA"])
def test_rows_say_what_the_sources_register(device):
    sources = [source.read_text() for source in (ROOT / "nvfp4_tensor/csrc").rglob("*.c*")]
    bodies = [body for text in sources for found, body in IMPLEMENTATIONS.findall(text) if found == device]
    assert native_ops(device) == {name for body in bodies for name in re.findall(r'm\.impl\("(\w+)"', body)}
    if native.library(device.lower()).loaded:
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        names = [name for name, *_ in ROW.findall((ROOT / "docs/verified.md").read_text())]
        assert {name for name in names if has_kernel(f"nvfp4::{name}", device)} == native_ops(device)
