"""Which backend multiplies: by operands and the device's capability; and products of plain operands by each."""

import pytest
import torch
import torch.nn.functional as F

from nvfp4_tensor import NVFP4Config, ProductBackend, QuantizeSpec, quantize, quantize_experts
from nvfp4_tensor.matmul import backends, product
from nvfp4_tensor.matmul.backends import FP8_ROWS, Backend
from nvfp4_tensor.numerics.codes import Codes
from nvfp4_tensor.numerics.hadamard import float_hadamard, inverse_hadamard

CAPABILITIES = [(0, 0), (8, 9), (9, 0), (10, 0)]
SPEC = QuantizeSpec()


def dense(*shape):
    return torch.randn(shape).bfloat16()


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_the_backend_of_each_product(monkeypatch, capability):
    monkeypatch.setattr(backends, "capability", lambda device: capability)
    w = quantize(dense(32, 64))
    w4a4, w8 = w._replace(activation_spec=SPEC), w._replace(product_backend=ProductBackend.FP8)
    by_row = torch.cat([w4a4, quantize(dense(4, 64) * 9)._replace(activation_spec=SPEC)])
    blackwell, hopper = capability == (10, 0), capability == (9, 0)
    on_codes = Backend.SCALED_MM if blackwell else Backend.QUANTIZED_VALUES
    of_fp8 = Backend.FP8_SCALED_MM if hopper else Backend.FP8_VALUES
    for x, weight, along, expected in (
        (dense(5, 64), w, True, Backend.DECODED),
        (dense(5, 32), w4a4, False, Backend.DECODED),
        (dense(5, 64), w4a4, True, on_codes),
        (dense(0, 64), w4a4, True, Backend.QUANTIZED_VALUES),
        (dense(5, 64), by_row, True, Backend.QUANTIZED_VALUES),
        (quantize(dense(5, 64)), w, True, Backend.SCALED_MM if blackwell else Backend.DECODED),
        (quantize(dense(64, 5)).t(), w, True, Backend.DECODED),
        (dense(FP8_ROWS, 64), w8, True, of_fp8),
        (dense(FP8_ROWS - 1, 64), w8, True, Backend.DECODED),
        (dense(2, FP8_ROWS, 64), w8, True, Backend.DECODED),
        (dense(FP8_ROWS, 64), w8[:0], True, Backend.FP8_VALUES),
    ):
        assert backends.choose(x, weight, along) == expected, (x.shape, weight, along)
    experts = quantize_experts(dense(2, 32, 64))
    grouped = Backend.GROUPED_FP4 if blackwell else Backend.QUANTIZED_VALUES
    quantized = experts._replace(activation_spec=SPEC)
    assert backends.choose_grouped(dense(5, 64), quantized.mT) == grouped
    assert backends.choose_grouped(dense(5, 64).half(), quantized.mT) == Backend.QUANTIZED_VALUES
    assert backends.choose_grouped(dense(5, 32), quantized) == Backend.DECODED
    assert backends.choose_grouped(dense(5, 64), experts.mT) == Backend.DECODED


def test_each_plan_is_printed_once(monkeypatch, capsys):
    monkeypatch.setattr(backends, "PRINTS_PLANS", True)
    backends._print_plan.cache_clear()
    w, offs = quantize(dense(32, 64)), torch.tensor([5], dtype=torch.int32)
    experts = quantize_experts(dense(1, 32, 64), activation_spec=SPEC)
    for _ in range(2):
        F.linear(dense(5, 64), w)
        torch._grouped_mm(dense(5, 64), experts.mT, offs=offs)
    said = "nvfp4_tensor: (5, 64) x {} torch.bfloat16 on cpu: {} ({})"
    assert capsys.readouterr().err.splitlines() == [
        said.format((32, 64), Backend.DECODED.value, "activations are not quantized (W4A16)"),
        said.format((1, 64, 32), Backend.QUANTIZED_VALUES.value, "cpu has no grouped FP4 product for these operands"),
    ]


def test_names_of_backends():
    assert NVFP4Config(product_backend="scaled_mm").product_backend == ProductBackend.SCALED_MM
    with pytest.raises(ValueError, match="'auto', 'scaled_mm', 'fbgemm'"):
        NVFP4Config(product_backend="cublas")


@pytest.mark.parametrize("pretended, expected", [
    ("", (9, 0)), ("capability=86,shared_bytes=101376", (8, 6)), ("multiprocessors=82", (9, 0)),
    ("capability=120", (9, 0)),
])  # fmt: skip
def test_a_pretended_capability_is_never_above_the_devices(pretended, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setenv("NVFP4_TENSOR_PRETEND", pretended)
    assert backends._cuda_capability.__wrapped__(torch.device("cuda")) == expected

    def is_hopper(x):
        return x + (backends._cuda_capability.__wrapped__(torch.device("cuda")) == (9, 0))

    torch.compiler.reset()
    traced = torch.compile(is_hopper, fullgraph=True, backend="eager")
    assert traced(torch.zeros(())).item() == (expected == (9, 0))


# --- plain operands, of training -------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [64, 50])
def test_gradients_of_transformed_activations_are_those_of_what_they_were(columns):
    """The weight is transformed, too: its transform is taken back from what a sum across its blocks gives."""
    spec = QuantizeSpec(hadamard_sign=0x1234)
    w = quantize(torch.randn(24, columns), spec)._replace(activation_spec=spec)
    stored = product.decode_values(Codes(w.qdata, w.scale, w.per_tensor_scale))[0].float() * w.per_tensor_scale
    plain = inverse_hadamard(stored, 0x1234)[:, :columns]
    padded = F.pad(torch.eye(columns), (0, -columns % 16))
    torch.testing.assert_close(float_hadamard(padded, 0x1234) @ stored.t(), plain.t(), rtol=1e-4, atol=1e-4)
    x, upstream = torch.randn(5, columns, requires_grad=True), torch.randn(5, 24)
    (grad,) = torch.autograd.grad(F.linear(x, w), x, upstream)
    torch.testing.assert_close(grad, upstream @ plain, rtol=1e-4, atol=1e-4)
    experts = quantize_experts(torch.randn(2, 24, columns), spec)._replace(activation_spec=spec)
    offs = torch.tensor([2, 5], dtype=torch.int32)
    y = torch._grouped_mm(upstream, experts, offs=offs)
    values = product.decode_values(Codes(experts.qdata, experts.scale, experts.per_tensor_scale))[0].float()
    of_experts = inverse_hadamard(values * experts.per_tensor_scale.view(2, 1, 1), 0x1234)[..., :columns]
    for expert, rows in ((0, slice(0, 2)), (1, slice(2, 5))):
        torch.testing.assert_close(y[rows], upstream[rows] @ of_experts[expert], rtol=1e-4, atol=1e-4)
