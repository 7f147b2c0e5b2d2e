"""Which backend multiplies: by operands and the device's capability."""

import pytest
import torch
import torch.nn.functional as F

from nvfp4_tensor import NVFP4Config, ProductBackend, QuantizeSpec, quantize, quantize_experts
from nvfp4_tensor.matmul import backends
from nvfp4_tensor.matmul.backends import FP8_ROWS, Backend

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
    joined = torch.cat([quantized, quantized], dim=1)  # gate and up: one scale per row
    for x, w in ((dense(5, 64).half(), quantized), (dense(0, 64), quantized), (dense(5, 64), joined)):
        assert backends.choose_grouped(x, w.mT) == Backend.QUANTIZED_VALUES
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
