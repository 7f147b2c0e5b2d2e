"""``nvfp4 inspect``: its counts against tensors that are made for them."""

import pytest
import torch

from nvfp4_tensor import quantize
from nvfp4_tensor.checkpoints.inspection import CODES, weight_of
from nvfp4_tensor.checkpoints.parts import LinearParts, parts_of


def test_inspect_sums_up_what_it_lists(quantized, run):
    said = run("inspect", quantized, "--json")
    total = said["total"]
    assert (said["format"], total["quantized_tensors"], len(said["tensors"])) == ("modelopt", 14, 14)
    assert sum(total["codes"].values()) == total["quantized_numbers"] == 16 * total["blocks"]
    assert total["quantized_numbers"] == 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128)
    assert total["clipped"] == sum(tensor["clipped"] for tensor in said["tensors"]) >= 2 * 3  # one an amax
    assert total["scales"][1] == 448.0 and total["bits_of_quantized"] == pytest.approx(4.5, abs=0.01)
    everything = run("inspect", quantized, "--all", "--json")["tensors"]
    assert {tensor["kind"] for tensor in everything} == {"W4A16", "bfloat16"}
    assert not any("scale_bytes" in tensor or None in tensor.values() for tensor in everything)
    everything, summary = run("inspect", quantized), run("inspect", quantized, "--summary")
    assert len(summary.splitlines()) == 3 and "14 of 21 tensors are NVFP4" in summary
    assert everything.startswith(summary.rstrip("\n")) and everything.count("q_proj.weight") == 2
    assert run("inspect", quantized, "--summary", "--json")["tensors"] == []


def test_inspect_counts_zero_clipped_and_nan_blocks():
    x = torch.ones(4, 64)
    x[0, :32] = 0  # two blocks of zeros
    x[1, 5] = float("nan")
    x[2, 16] = 1000.0  # every other block is tiny beside it: 1000 / 6 / 448 a step
    found = weight_of("w", parts_of(quantize(x, amax=1000.0)))
    assert (found.blocks, found.nan, found.clipped) == (16, 1, 1)
    assert found.zero == 2
    assert sum(found.codes) == 64 * 4
    assert found.codes[CODES.index("6")] >= 1


def test_inspect_finds_blocks_that_are_zero_by_their_codes_or_scale():
    scale = torch.tensor([[2.0, 2.0, 0.0, 2**-8]]).to(torch.float8_e4m3fn)
    # -0; 0 but for one 0.5; then 0.5 everywhere, with a scale of 0 and with a small one
    qdata = torch.tensor([[0x80] * 8 + [0x08] * 7 + [0x18] + [0x11] * 16], dtype=torch.uint8)
    found = weight_of("w", LinearParts(qdata=qdata, scale=scale, per_tensor_scale=torch.ones(()), columns=64))
    assert (found.zero, found.blocks, found.scales) == (2, 4, (2**-8, 2.0))
    assert (found.codes[CODES.index("-0")], found.codes[CODES.index("0.5")]) == (16, 33)
