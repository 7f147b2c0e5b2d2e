"""``nvfp4 quantize --bits``: the linears that stay dense."""

import math

import pytest

import nvfp4_cli
from nvfp4_tensor import checkpoints

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("how", [["--w4a16"], [], ["--gptq"]], ids=["w4a16", "w4a4", "gptq"])
def test_a_budget_leaves_dense_what_costs_most(how, dense, text, tmp_path, run):
    given = ["--calibrate", text, "--tokens", 64, "--bits", 7, "--json", *how]
    said = run("quantize", dense, tmp_path / "q", *given)
    budget = said["budget"]
    costs = budget["costs"]
    assert 4.5 < budget["bits"] <= 7 and len(costs) == 8 and sum(len(c["weights"]) for c in costs) == 14
    assert [c["loss"] for c in costs] == sorted((c["loss"] for c in costs), reverse=True) and costs[-1]["loss"] > 0
    assert {len(c["weights"]) for c in costs} == {1, 2, 3}  # q, k, v and gate, up stay together
    left = {name for c in costs if c["dense"] for name in c["weights"]}
    with checkpoints.read(tmp_path / "q") as checkpoint:
        entries = checkpoint.entries
    assert left and left == {n for n, e in entries.items() if n.endswith("_proj.weight") and not e.quantized}
    assert said["w4a4"] == (not how)
    bits = sum((16 if n in left else 4.5) * math.prod(entries[n].shape) for c in costs for n in c["weights"])
    # In memory, where a budget counts, the scales of such small weights are padded.
    assert bits / sum(c["elements"] for c in costs) == pytest.approx(budget["bits"], abs=0.3)
    room = (7 - budget["bits"]) * sum(c["elements"] for c in costs)
    assert all(c["elements"] * 11.4 > room for c in costs if not c["dense"])
    assert "left dense: model.layers" in run("quantize", dense, tmp_path / "said", *(g for g in given if g != "--json"))


def test_a_budget_that_is_too_small(dense, text, tmp_path):
    arguments = ["quantize", dense, tmp_path / "q", "--calibrate", text, "--bits", 4.5, "--tokens", 64]
    assert nvfp4_cli.main([str(each) for each in arguments]) == 1 and not (tmp_path / "q").exists()
    assert nvfp4_cli.main(["quantize", str(dense), str(tmp_path / "q"), "--bits", "5"]) == 2
