"""Test that docs/verified.md names, for each operator and device, what serves it: a native kernel or plain torch."""

import importlib
import re
from pathlib import Path

import pytest
import torch

from nvfp4_tensor.ops import native

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"\| `(\w+)` \| (native|plain) \| (native|plain) \|(.*)\|")
IMPLEMENTATIONS = re.compile(r"STABLE_TORCH_LIBRARY_IMPL\(NVFP4_OPS, (\w+), m\) \{(.*?)\n\}", re.DOTALL)


def documented():
    """{operator: {device: native or plain}} and {operator: reason} of the table."""
    rows = [ROW.fullmatch(line) for line in (ROOT / "docs/verified.md").read_text().splitlines()]
    found = [row.groups() for row in rows if row]
    assert len({name for name, *_ in found}) == len(found)
    return {name: {"CPU": cpu, "CUDA": cuda} for name, cpu, cuda, _ in found}, {row[0]: row[3].strip() for row in found}


def implemented():
    """{device: operators} that the C++ sources register."""
    names = {"CPU": set(), "CUDA": set()}
    for source in (ROOT / "nvfp4_tensor/csrc").rglob("*.c*"):
        for device, body in IMPLEMENTATIONS.findall(source.read_text()):
            names[device] |= set(re.findall(r'm\.impl\("(\w+)"', body))
    return names


def operators():
    importlib.import_module("nvfp4_tensor.training.linear.grouped")  # the only room beside ops that defines operators
    schemas = torch._C._jit_get_all_schemas()
    return {schema.name.removeprefix("nvfp4::") for schema in schemas if schema.name.startswith("nvfp4::")}


def test_each_operator_has_a_row():
    serving, _ = documented()
    assert set(serving) == operators()


@pytest.mark.parametrize("device", ["CPU", "CUDA"])
def test_rows_say_what_the_sources_register(device):
    serving, _ = documented()
    assert {name for name, by in serving.items() if by[device] == "native"} == implemented()[device]


def test_plain_torch_has_a_reason():
    serving, reasons = documented()
    assert {name for name, by in serving.items() if "plain" in by.values()} == {n for n, why in reasons.items() if why}


@pytest.mark.parametrize("device", ["CPU", pytest.param("CUDA", marks=pytest.mark.gpu)])
def test_the_dispatcher_has_these_kernels(device):
    if not native.library(device.lower()).loaded:
        pytest.skip(f"the {device} library is not in use")
    serving, _ = documented()
    for name, by in serving.items():
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(f"nvfp4::{name}", device)
        assert has_kernel == (by[device] == "native"), name
