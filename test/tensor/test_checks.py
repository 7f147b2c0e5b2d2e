"""A tensor is checked when it is created from given fields, by the constructor and by a pickle."""

import pickle

import pytest
import torch
from helpers.files import saved
from helpers.refusals import refuses

from nvfp4_tensor import NVFP4Tensor, ProductBackend, QuantizeSpec, quantize
from nvfp4_tensor.numerics.layout import swizzle

HADAMARD = QuantizeSpec(hadamard_sign=True)


def fields(*shape: int) -> dict:
    """Return the fields of a valid tensor of that shape."""
    return quantize(torch.randn(*shape or (130, 70)).to(torch.bfloat16))._fields()


@pytest.mark.smoke
def test_valid_fields_make_the_tensor():
    plain = torch.randint(0, 0x7F, (130, 5), dtype=torch.uint8)
    qdata, factor = torch.randint(0, 256, (130, 40), dtype=torch.uint8), torch.tensor(0.5)
    t = NVFP4Tensor(
        qdata, swizzle(plain).view(torch.float8_e4m3fn), factor, 70, torch.bfloat16, HADAMARD,
        activation_spec=HADAMARD, transposed=True, product_backend=ProductBackend.SCALED_MM,
        activation_amax=torch.tensor(2.0),
    )  # fmt: skip
    assert t.shape == (70, 130) and torch.equal(t.unswizzled_scale().view(torch.uint8), plain)
    for changed in ({"per_tensor_scale": torch.rand(130)}, {"columns": 80}, {"columns": 65}):
        assert NVFP4Tensor(**{**fields(), **changed}).dequantize().shape == (130, changed.get("columns", 70))
    experts = fields(3, 5, 32)
    for factor in (torch.rand(3, 1), torch.rand(15), torch.rand(())):
        assert NVFP4Tensor(**{**experts, "per_tensor_scale": factor}).dequantize().shape == (3, 5, 32)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"qdata": None}, TypeError, "qdata must be a tensor of torch.uint8, got NoneType"),
        ({"qdata": torch.tensor(0, dtype=torch.uint8)}, ValueError, "qdata must have at least one dimension"),
        ({"qdata": torch.zeros(129, 40, dtype=torch.uint8).to_sparse()}, TypeError, "qdata must be a dense tensor"),
        ({"qdata": torch.zeros(300, 40, dtype=torch.uint8)}, ValueError, r"scale must be swizzled, \(3, 2, 32, 16\)"),
        ({"columns": 64}, ValueError, r"columns 64 does not match qdata \(130, 40\)"),
        ({"columns": -5, "qdata": torch.zeros(130, 0, dtype=torch.uint8)}, ValueError, "columns -5 does not match"),
        ({"columns": 70.0}, TypeError, "columns must be an integer.*70.0"),
        ({"columns": True}, TypeError, "columns must be an integer.*True"),
        ({"scale": torch.zeros(2, 2, 32, 16)}, TypeError, "scale must be a tensor of torch.float8_e4m3fn, got"),
        ({"scale": torch.zeros(130, 5).to(torch.float8_e4m3fn)}, ValueError, r"\(2, 2, 32, 16\).*layout.swizzle"),
        ({"per_tensor_scale": torch.ones((), dtype=torch.bfloat16)}, TypeError, "per_tensor_scale.*torch.bfloat16"),
        ({"per_tensor_scale": torch.ones(1)}, ValueError, r"per_tensor_scale must be \(\) or \(130,\)"),
        ({"per_tensor_scale": torch.ones((), device="meta")}, ValueError, "per_tensor_scale is on meta, but qdata is"),
        ({"orig_dtype": torch.float64}, TypeError, "orig_dtype must be torch.bfloat16.*torch.float64"),
        ({"spec": None}, TypeError, "spec must be a QuantizeSpec, got None"),
        ({"activation_spec": "rne"}, TypeError, "activation_spec must be a QuantizeSpec or None, got 'rne'"),
        ({"activation_spec": HADAMARD}, ValueError, "must have the same hadamard_sign"),
        ({"activation_amax": 3.0}, TypeError, "activation_amax must be a tensor of torch.float32, got float"),
        ({"activation_amax": torch.ones(1)}, ValueError, r"activation_amax must be one number, 0-d, got \(1,\)"),
        ({"transposed": 1}, TypeError, "transposed must be True or False, got 1"),
        ({"product_backend": ProductBackend.FP8, "activation_spec": QuantizeSpec()}, ValueError, "to NVFP4: give one"),
        ({"product_backend": "auto"}, TypeError, "product_backend must be a ProductBackend.*'auto'"),
    ],
)
def test_invalid_fields_raise_an_error_that_names_them(changed, error, message):
    parts = {**fields(), **changed}
    with pytest.raises(error, match=message):
        NVFP4Tensor(**parts)
    if isinstance(parts["scale"], torch.Tensor) and parts["scale"].dtype == torch.float8_e4m3fn:
        parts["scale"] = parts["scale"].view(torch.uint8)
        with pytest.raises(error, match=message):
            NVFP4Tensor._from_pickle(parts, False, False)


test_fields_of_other_dimensions_raise = refuses(
    (lambda: NVFP4Tensor(**fields(3, 5, 32) | {"per_tensor_scale": torch.ones(5, 1)}), r"\(\) or \(15,\) or \(3, 1\)"),
    (lambda: NVFP4Tensor(**fields(16) | {"transposed": True}), "transposed=True needs two dimensions"),
)


@pytest.mark.parametrize("weights_only", [True, False])
def test_loading_inconsistent_fields_raises(weights_only):
    """A pickle that combines the codes of one tensor with the scales of another."""
    rebuild, (parts, *rest) = quantize(torch.randn(130, 70)).__reduce_ex__(2)[:2]
    mixed = quantize(torch.randn(130, 70))
    mixed.qdata = parts["qdata"][:, :16].contiguous()
    with pytest.raises((ValueError, pickle.UnpicklingError), match=r"columns 70 does not match qdata \(130, 16\)"):
        saved(mixed, weights_only)
    for name in ("scale", "qdata", "spec"):
        left = {key: value for key, value in parts.items() if key != name}
        with pytest.raises(TypeError, match=name):
            rebuild(left, *rest)
