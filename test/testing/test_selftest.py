import pytest
import torch

from nvfp4_tensor import QuantizeSpec
from nvfp4_tensor.testing import selftest


@pytest.mark.parametrize("spec", [QuantizeSpec(), QuantizeSpec(round_mode="stochastic", block_rows=16)], ids=str)
def test_this_machine_agrees_with_the_reference(spec):
    checks = list(selftest.check_spec(spec, "cpu"))
    by_row = {"quantize_rows"} if spec.block_rows == 1 else set()
    assert {check.op for check in checks} == by_row | {
        "amax", "amax_pair", "quantize", "quantize_pair", "dequantize", "fake_quantize",
        "quantize_activation", "quantize_pair_values",
    }  # fmt: skip
    assert all(check.differing == 0 and check.elements > 0 for check in checks), checks
    assert selftest.check_hadamard("cpu").differing == 0
    assert selftest.check_matmul("cpu").differing == 0
    for activation in (None, QuantizeSpec()):
        check = selftest.check_experts("grouped_linear", "cpu", activation)
        assert check.differing == 0 and check.elements == 3 * 128 + 90 * 72 + 300 * 256


def test_the_rotation_is_checked_under_eden():
    checks = {check.op: check for check in selftest.check_spec(QuantizeSpec(round_mode="eden"), "cpu")}
    assert {"rotate", "amax_rotated", "quantize", "quantize_pair_values"} < checks.keys()
    assert all(check.differing == 0 and check.elements > 0 for check in checks.values()), checks


def test_a_wrong_bit_in_a_kernel_is_counted_and_fails(monkeypatch, capsys):
    quantize = torch.ops.nvfp4.quantize

    def one_wrong_code(x, *arguments):
        qdata, scale, factor = quantize(x, *arguments)
        qdata = qdata.clone()
        qdata[0, 0] ^= 1
        return qdata, scale, factor

    monkeypatch.setattr(torch.ops.nvfp4, "quantize", one_wrong_code)
    monkeypatch.setattr(selftest, "SPECS", (QuantizeSpec(),))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    checks = {check.op: check for check in selftest.check_spec(QuantizeSpec(), "cpu")}
    assert checks["quantize"].differing == sum(1 for _ in selftest.samples())
    assert checks["dequantize"].differing == 0
    assert selftest.main() == 1
    out = capsys.readouterr().out
    assert "elements differ" in out and "1 DIFFER from the reference" in out


@pytest.mark.smoke
def test_a_wrong_product_leaves_the_bound(monkeypatch):
    matmul = torch.ops.nvfp4.matmul
    monkeypatch.setattr(torch.ops.nvfp4, "matmul", lambda *arguments: matmul(*arguments) * 1.01)
    for check in (selftest.check_matmul("cpu"), selftest.check_experts("grouped_linear", "cpu", None)):
        assert check.differing > check.elements / 2


def test_results_are_compared_bit_for_bit():
    x = torch.tensor([0.0, 1.0, float("nan")])
    assert selftest.differing_bits(x, x.clone()) == 0
    assert selftest.differing_bits(x, torch.tensor([-0.0, 1.0, 2.0])) == 2
    assert selftest.differing_bits(x, x.double()) == 3
    assert selftest.differing_bits(x, x[:2]) == 3


def test_the_bound_accepts_a_rounded_sum_and_rejects_the_next_number():
    a, b = torch.ones(1, 16, dtype=torch.float64), torch.full((16, 1), 1 / 3, dtype=torch.float64)
    y = (a @ b).to(torch.bfloat16)
    assert selftest.outside_bound(y, a, b) == 0
    assert selftest.outside_bound(y * (1 + 2**-7), a, b) == 1
    assert selftest.outside_bound(torch.full_like(y, float("nan")), a, b) == 1
