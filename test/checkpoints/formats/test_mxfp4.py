"""MXFP4 to NVFP4: equal values, or an error if there are none; folders of gpt-oss."""

import json

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from nvfp4_tensor import checkpoints
from nvfp4_tensor.checkpoints.formats.mxfp4 import values as mxfp4
from nvfp4_tensor.numerics.layout import code_values, scale_values, unpack


def decode(codes, scales):
    """float64 values of MXFP4."""
    values = code_values(unpack(codes)).double().view(*scales.shape, 32)
    return torch.ldexp(values, scales.int().unsqueeze(-1) - 127).flatten(-2)


def values_of(parts):
    """float64 values of NVFP4 parts."""
    values = code_values(unpack(parts.qdata)).double().view(*parts.scale.shape, 16)
    return (values * scale_values(parts.scale).double().unsqueeze(-1)).flatten(-2) * parts.per_tensor_scale.double()


def random_mxfp4(rows, groups, low, high, seed=0):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(256, (rows, groups * 16), dtype=torch.uint8, generator=generator)
    return codes, torch.randint(low, high + 1, (rows, groups), generator=generator).to(torch.uint8)


def test_wider_spans_move_codes_where_they_can():
    codes = torch.zeros(2, 16, dtype=torch.uint8)
    codes[0] = 0x77  # 6 and 6: doubles never, halves once
    codes[1] = 0x11  # 0.5: doubles three times
    scales = torch.tensor([[120], [100]], dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"2\^-27 to 2\^-7 .* lossy"):
        mxfp4.parts_of_mxfp4(codes, scales)  # 20 apart: 6 halves to 3 to 1.5, but 0.5 only halves to nothing
    codes[1] = 0x44  # 2: halves twice
    scales = torch.tensor([[122], [103]], dtype=torch.uint8)  # 19 apart
    parts = mxfp4.parts_of_mxfp4(codes, scales)
    assert torch.equal(values_of(parts), decode(codes, scales))
    assert parts.qdata.unique().tolist() == [0x11, 0x77]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 250), st.integers(0, 30))
@example(0, 110, 17).via("both ends")
@example(0, 0, 17).via("both ends")
@example(0, 237, 17).via("both ends")
def test_exact_or_refused(seed, low, span):
    """A span of 17 powers is exact, and no code moves."""
    codes, scales = random_mxfp4(5, 3, low, min(low + span, 254), seed)
    scales[0, :2] = torch.tensor([low, min(low + span, 254)])
    codes &= 0x66 if seed % 2 else 0xFF  # even codes: 0, 1, 2, 4, which move
    try:
        parts = mxfp4.parts_of_mxfp4(codes, scales)
    except ValueError:
        assert span > 17
    else:
        assert torch.equal(values_of(parts), decode(codes, scales)) and parts.per_tensor_scale.dtype == torch.float32
        assert span > 17 or torch.equal(parts.qdata, codes)


def test_lossy_rounds_only_what_is_too_small():
    codes, scales = random_mxfp4(16, 8, 90, 126)
    parts = mxfp4.parts_of_mxfp4(codes, scales, lossy=True)
    got, want = values_of(parts), decode(codes, scales)
    assert not torch.equal(got, want)
    smallest = 2.0 ** (int(scales.max()) - 127 - 17)  # block scale, of codes 0.5 apart
    assert (got - want).abs().max() == smallest / 4
    exact = scales.repeat_interleave(32, dim=1) >= int(scales.max()) - 17
    assert torch.equal(got[exact], want[exact])


def test_nan_and_zero_blocks():
    codes, scales = random_mxfp4(4, 2, 120, 122)
    scales[1, 0] = 255
    codes[2, :16] = 0x80  # zeros, one of them negative
    scales[2, 0] = 3  # far below: does not count
    parts = mxfp4.parts_of_mxfp4(codes, scales)
    assert parts.scale.view(torch.uint8)[1, :2].tolist() == [0x7F, 0x7F]
    got, want = values_of(parts), decode(codes, scales)
    assert got[1, :32].isnan().all()
    keep = torch.ones_like(got, dtype=torch.bool)
    keep[1, :32] = False
    assert torch.equal(got[keep], want[keep])


@pytest.mark.parametrize("experts", [None, 3])
def test_gpt_oss_layout(experts):
    leading = () if experts is None else (experts,)
    blocks = torch.randint(256, (*leading, 8, 2, 16), dtype=torch.uint8)
    scales = torch.randint(115, 125, (*leading, 8, 2), dtype=torch.uint8)
    if experts:
        scales[1] += 60  # each matrix has a per-tensor scale of its own
    t = mxfp4.to_nvfp4(blocks, scales)
    assert t.shape == (*leading, 8, 64) and t.dtype == torch.bfloat16
    assert torch.equal(t.dequantize(torch.float32).double(), decode(blocks.flatten(-2), scales))


def test_transformers_decodes_the_same():
    mxfp4_of_transformers = pytest.importorskip("transformers.integrations.mxfp4")
    blocks = torch.randint(256, (2, 8, 2, 16), dtype=torch.uint8)
    scales = torch.randint(115, 125, (2, 8, 2), dtype=torch.uint8)
    want = mxfp4_of_transformers.convert_moe_packed_tensors(blocks, scales)  # (E, K, N)
    assert torch.equal(mxfp4.to_nvfp4(blocks, scales).dequantize(), want.transpose(1, 2))


@pytest.mark.parametrize(
    ("blocks", "scales", "message"),
    [
        (torch.zeros(4, 32, dtype=torch.int8), torch.zeros(4, 2, dtype=torch.uint8), "uint8, got torch.int8"),
        (torch.zeros(4, 32, dtype=torch.uint8), torch.zeros(4, 3, dtype=torch.uint8), r"\(4, 3\) and codes \(4, 32\)"),
        (torch.zeros(32, dtype=torch.uint8), torch.zeros(2, dtype=torch.uint8), r"\(N, K/32\)"),
    ],
)
def test_refusals(blocks, scales, message):
    with pytest.raises(ValueError, match=message):
        mxfp4.to_nvfp4(blocks, scales)


EXPERTS = "model.layers.0.mlp.experts.down_proj"


def a_folder(path, blocks, scales, **config):
    path.mkdir()
    tensors = {f"{EXPERTS}_blocks": blocks, f"{EXPERTS}_scales": scales, f"{EXPERTS}_bias": torch.ones(3, 8)}
    save_file({name: t for name, t in tensors.items() if t is not None}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "mxfp4"}, **config}))


def test_a_folder_of_gpt_oss(tmp_path):
    blocks = torch.randint(256, (3, 8, 2, 16), dtype=torch.uint8)
    scales = torch.randint(115, 125, (3, 8, 2), dtype=torch.uint8)
    a_folder(tmp_path / "a", blocks, scales)
    assert checkpoints.detect(tmp_path / "a") == "mxfp4"
    checkpoints.convert(tmp_path / "a", tmp_path / "b", to="modelopt", progress=False)
    want = mxfp4.to_nvfp4(blocks, scales)
    with checkpoints.read(tmp_path / "b") as checkpoint:
        assert torch.equal(checkpoints.tensor_of(checkpoint.linear(EXPERTS)).dequantize(), want.dequantize())
        assert torch.equal(checkpoint.dense(f"{EXPERTS}_bias"), torch.ones(3, 8))


def test_scales_too_far_apart_are_named(tmp_path):
    scales = torch.full((3, 8, 2), 120, dtype=torch.uint8)
    scales[0, 0, 0] = 3
    a_folder(tmp_path / "a", torch.full((3, 8, 2, 16), 0x77, dtype=torch.uint8), scales)
    with checkpoints.read(tmp_path / "a") as checkpoint, pytest.raises(ValueError, match=f"{EXPERTS}: MXFP4 scales"):
        checkpoint.linear(EXPERTS)
