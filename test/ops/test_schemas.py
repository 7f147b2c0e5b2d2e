"""The registered schemas. C++ registers kernels under them, and exported programs contain them."""

import inspect
from pathlib import Path

import pytest
import torch

from nvfp4_tensor import QuantizeSpec
from nvfp4_tensor.ops import schemas

GOLDEN = (Path(__file__).parents[1] / "data/op_schemas.txt").read_text().splitlines()
NAMES = [schema.removeprefix("nvfp4::").partition("(")[0] for schema in GOLDEN]


def test_every_op_has_a_golden_schema():
    """All ops of this subpackage. Others, as those of ``training``, are registered when their modules are imported."""
    assert sorted(schemas._parameters) == NAMES
    registered = torch._C._dispatch_get_all_op_names()
    assert {f"nvfp4::{name}" for name in NAMES} <= set(registered)


@pytest.mark.parametrize("name, schema", zip(NAMES, GOLDEN, strict=True), ids=NAMES)
def test_schema_and_tags(name, schema):
    op = getattr(torch.ops.nvfp4, name).default
    assert str(op._schema) == schema
    seeded = [torch.Tag.nondeterministic_seeded] if name in ("draw_rng_state", "train_linear_forward") else []
    assert set(op.tags) == {torch.Tag.pt2_compliant_tag, *seeded}


def test_a_fake_gets_its_arguments_by_name():
    def signature(x, spec, row0=3, codes=True):
        raise AssertionError

    parameters = dict(inspect.signature(signature).parameters)
    call = schemas._bind("op", lambda codes, spec, row0: (codes, spec, row0), parameters)
    assert call("x", 1) == (True, 1, 3)
    assert call("x", 1, 2) == (True, 1, 2)
    assert call("x", 1, codes=False) == (False, 1, 3)
    with pytest.raises(AssertionError, match="colour"):
        schemas._bind("op", lambda colour: colour, parameters)


def test_an_op_does_not_return_memory_without_values():
    """The dispatcher runs the fake if any argument is on the meta device."""
    x, w, spec = torch.randn(16, 32), torch.randn(16, 32, device="meta"), QuantizeSpec().pack()
    with pytest.raises(RuntimeError, match="train_linear takes tensors on one device, got cpu and meta"):
        torch.ops.nvfp4.train_linear(x, None, w, None, None, spec, torch.float32)
    state = torch.empty(2, dtype=torch.int64, device="meta")
    with pytest.raises(RuntimeError, match="quantize takes tensors on one device, got cpu and meta"):
        torch.ops.nvfp4.quantize(x, None, state, spec)
    assert torch.ops.nvfp4.quantize(w, None, None, spec)[0].is_meta
