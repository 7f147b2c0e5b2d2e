"""Attention to codes and appending to them on CUDA, against plain torch on a CPU."""

import pytest
import torch
from helpers.cached_attention import LENGTHS, SPEC, append_with, assert_close, capacity_of, problem
from helpers.instruction_sets import assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4_tensor import QuantizeSpec
from nvfp4_tensor.ops import composite

pytestmark = pytest.mark.gpu
nvfp4 = torch.ops.nvfp4
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def on_cuda(arguments):
    return [t.cuda() if isinstance(t, torch.Tensor) else t for t in arguments]


def check(arguments, **options):
    expected = composite.attend_codes(*arguments, **options)
    out = nvfp4.attend_codes(*on_cuda(arguments), **options)
    assert_close(out.cpu(), expected, arguments[0].dtype)
    return out


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("size", [64, 96, 128, 256])
def test_lengths_and_sizes(length, size, rotated):
    check(problem(lengths=(length, max(length - 1, 0)), size=size), rotated=rotated)


@pytest.mark.parametrize("size, value_size", [(16, 16), (24, 40), (48, 32), (80, 80), (112, 112), (192, 128), (512, 8)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_odd_sizes_and_dtypes(size, value_size, dtype):
    arguments = problem(size=size, value_size=value_size, lengths=(70, 33), dtype=dtype)
    expected = check(arguments)
    assert not torch.equal(check(arguments, rotated=True), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 96, 128, 256])
def test_dtypes(size, dtype):
    check(problem(size=size, lengths=(700, 33), dtype=dtype, front=4), softcap=30.0, rotated=True)


@pytest.mark.parametrize("tokens", [1, 2, 5, 16, 17, 40])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("size", [64, 96, 128])
def test_groups_and_new_tokens(tokens, group, size):
    check(problem(tokens=tokens, group=group, latest=45, lengths=(600, 90), size=size), softcap=20.0)


@pytest.mark.parametrize("tokens", [1, 4, 16])
@pytest.mark.parametrize("size", [64, 96, 128])
def test_new_tokens_in_codes(tokens, size):
    """Nothing is dense: the causal mask cuts codes."""
    check(problem(tokens=tokens, latest=0, lengths=(513, 33), size=size), rotated=True)


@settings(max_examples=150, deadline=None)
@given(
    batch=st.integers(1, 3), kv_heads=st.integers(1, 3), group=st.integers(1, 5), tokens=st.integers(1, 20),
    size=st.sampled_from([32, 64, 80, 96, 128, 256]), latest=st.integers(0, 70), front=st.integers(0, 40),
    lengths=st.lists(st.sampled_from(LENGTHS), min_size=3, max_size=3), window=st.integers(0, 800),
    softcap=st.sampled_from([0.0, 3.0, 50.0]), dtype=st.sampled_from(DTYPES),
    first=st.lists(st.integers(0, 700), min_size=3, max_size=3) | st.none(), slack=st.integers(0, 100),
    seed=st.integers(0, 1000), rotated=st.booleans(),
)  # fmt: skip
def test_random_problems(
    batch, kv_heads, group, tokens, size, latest, front, lengths, window, softcap, dtype, first, slack, seed, rotated
):
    arguments = problem(
        batch, kv_heads, group, tokens, size, None, lengths[:batch], latest + tokens, front, dtype, seed,
        first and first[:batch], slack,
    )  # fmt: skip
    check(arguments, softcap=softcap, window=window, rotated=rotated)


def test_nothing_to_see_is_zero():
    out = check(problem(tokens=3, lengths=(40, 40), latest=3, first=(0, 42)))
    assert torch.equal(out[1, :, :2], torch.zeros_like(out[1, :, :2])) and out[1, :, 2].any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["q", "latest key", "latest value", "front key", "key scale", "value scale"])
@pytest.mark.parametrize("size", [64, 80, 96, 128])
def test_what_is_not_finite_reaches_its_queries_only(value, where, size):
    arguments = problem(front=4, lengths=(50, 600), size=size)
    index = {
        "q": 0, "latest key": 11, "latest value": 12, "front key": 9, "key scale": 2, "value scale": 5,
    }[where]  # fmt: skip
    arguments[index][1, 0, 3 if index else 0, 1] = 0x7F if "scale" in where else value
    out = check(arguments)
    assert out[0].isfinite().all() and not out[1].isfinite().all()
    assert out[1, 3:].isfinite().all()  # of the other head of keys


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores_saturate(dtype):
    """Of a few thousand, where one weight has nearly everything."""
    arguments = problem(dtype=dtype)
    arguments[0] = arguments[0] * 1e4
    check(arguments)
    check(arguments, softcap=30.0)


@pytest.mark.parametrize("tokens, size", [(1, 128), (4, 64), (30, 128), (1, 96)])
def test_results_repeat(tokens, size):
    arguments = on_cuda(problem(batch=3, lengths=(5000, 700, 1), tokens=tokens, latest=33, size=size))
    first = nvfp4.attend_codes(*arguments)
    for _ in range(3):
        assert_same_bits(nvfp4.attend_codes(*arguments), first)


def test_long_contexts_in_many_splits():
    check(problem(batch=1, kv_heads=1, group=4, lengths=(30000,), size=128, slack=999), rotated=True)
    check(problem(batch=12, kv_heads=6, group=2, lengths=(1900,) * 12, size=128), rotated=True)


def test_views_of_larger_buffers():
    arguments = on_cuda(problem(front=6, lengths=(40, 30)))
    expected = nvfp4.attend_codes(*arguments)
    for i in (9, 10, 11, 12):
        buffer = torch.full((*arguments[i].shape[:2], 64, 64 + 8), torch.nan, dtype=torch.bfloat16, device="cuda")
        view = buffer[:, :, 5 : 5 + arguments[i].shape[2], :64]
        arguments[i] = view.copy_(arguments[i])
    arguments[0] = arguments[0].transpose(1, 2).contiguous().transpose(1, 2)
    assert_same_bits(nvfp4.attend_codes(*arguments), expected)


def test_a_graph_follows_lengths_on_the_device():
    """What was captured for one length serves others."""
    arguments = on_cuda(problem(lengths=(1100, 900), size=128))
    lengths = arguments[7] = arguments[7].clone()
    nvfp4.attend_codes(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = nvfp4.attend_codes(*arguments)
    for new in ((0, 1), (17, 900), (1100, 512)):
        lengths.copy_(torch.tensor(new))
        graph.replay()
        assert_same_bits(out, nvfp4.attend_codes(*arguments))
        at = [t.cpu() if isinstance(t, torch.Tensor) else t for t in arguments]
        assert_close(out.cpu(), composite.attend_codes(*at), torch.bfloat16)


@pytest.mark.parametrize("size", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_settled_codes_are_read_while_the_kernel_before_writes_others(size, dtype):
    """Behind ``lengths``, as a step's graph does, which also writes what is dense."""
    arguments = on_cuda(problem(batch=1, group=4, lengths=(1100,), size=size, slack=40, dtype=dtype, latest=65))
    expected = nvfp4.attend_codes(*arguments)
    ring, starts = arguments[11].clone(), arguments[7].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            arguments[11].copy_(ring)  # no kernel of ours, so what follows begins when it has ended
            nvfp4.append_codes(ring[:, :, :9], ring[:, :, :9], SPEC.pack(), *arguments[1:7], starts)
            out = nvfp4.attend_codes(*arguments, settled=True)
    for _ in range(20):
        graph.replay()
        assert_same_bits(out, expected)


def test_lengths_beyond_the_capacity_are_cut():
    """The host cannot look at them."""
    arguments = on_cuda(problem(lengths=(160, 160)))
    expected = nvfp4.attend_codes(*arguments)
    arguments[7] = torch.tensor([10**12, 161], device="cuda")
    assert_same_bits(nvfp4.attend_codes(*arguments), expected)


# --- append ----------------------------------------------------------------------------------------------------------

SPECS = [
    QuantizeSpec(), QuantizeSpec(four_over_six="mse"), SPEC, QuantizeSpec(round_mode="away"),
    QuantizeSpec(scale_search="mse", scale_rounding="up"),
]  # fmt: skip


def appended_on_cuda(*arguments):
    keys, values, spec, key_codes, key_scale, key_factor, value_codes, value_scale, value_factor, starts, rotates = (
        arguments
    )
    stored = [key_codes, key_scale, key_factor, value_codes, value_scale, value_factor]
    there = on_cuda(stored)
    nvfp4.append_codes(keys.cuda(), values.cuda(), spec, *there, starts.cuda(), rotates)
    for t, new in zip(stored, there, strict=True):
        t.copy_(new)


@settings(max_examples=80, deadline=None)
@given(
    spec=st.sampled_from(SPECS), dtype=st.sampled_from(DTYPES),
    tokens=st.sampled_from([0, 1, 2, 15, 16, 63, 64, 65, 130]),
    size=st.sampled_from([16, 24, 64, 80, 128, 256, 512]), value_size=st.sampled_from([16, 40, 64]),
    starts=st.lists(st.integers(0, 30), min_size=2, max_size=2), rotates=st.booleans(), seed=st.integers(0, 100),
)  # fmt: skip
def test_append_has_the_bits_of_plain_torch(spec, dtype, tokens, size, value_size, starts, rotates, seed):
    generator = torch.Generator().manual_seed(seed)
    keys, values = (
        (torch.randn((2, 3, tokens, n), generator=generator)
         * 2.0 ** torch.randint(-40, 14, (2, 3, tokens, 1), generator=generator)).to(dtype)
        for n in (size, value_size)
    )  # fmt: skip
    if tokens:
        keys[1, 2, 0] = 0
        keys[0, 1, -1, 3], values[1, 0, 0, 5], values[0, 2, 0, 0] = torch.nan, torch.inf, -torch.inf
    arguments = keys, values, spec, starts, capacity_of(tokens + 30), rotates
    expected = append_with(composite.append_codes, *arguments)
    for got, right in zip(append_with(appended_on_cuda, *arguments), expected, strict=True):
        assert torch.equal(got, right)


@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_append_of_any_magnitude(dtype, rotates):
    tiny, most = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    sizes = torch.tensor([0.0, tiny / 4, tiny, 1e-4, 1.0, most / 4]).view(1, 1, -1, 1)
    keys = (torch.randn(1, 2, 6, 64, generator=torch.Generator().manual_seed(0)).clamp(-3.9, 3.9) * sizes).to(dtype)
    arguments = keys, keys, QuantizeSpec(), [3], 16, rotates
    for got, right in zip(
        append_with(appended_on_cuda, *arguments), append_with(composite.append_codes, *arguments), strict=True
    ):
        assert torch.equal(got, right)


def test_append_of_views_of_a_projection():
    """Keys and values as transformers has them: heads within rows of tokens."""
    states = torch.randn(2, 33, 4, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    for skip in (0, 1):
        heads = states.flatten(2)[..., skip : skip + 3 * 128].unflatten(-1, (3, 128)).transpose(1, 2)
        arguments = heads, heads, SPEC, [0, 5], 48, True
        for got, right in zip(
            append_with(appended_on_cuda, *arguments), append_with(composite.append_codes, *arguments), strict=True
        ):
            assert torch.equal(got, right)


def test_append_writes_nothing_beyond_the_capacity():
    keys = torch.randn(2, 3, 5, 64).bfloat16()
    within = append_with(appended_on_cuda, keys[:, :, :2], keys[:, :, :2], SPEC, [14, 14], 16)
    beyond = append_with(appended_on_cuda, keys, keys, SPEC, [14, 14], 16)
    for got, right in zip(beyond, within, strict=True):
        assert torch.equal(got, right)


@pytest.mark.parametrize(
    "index, change, message",
    [
        (1, lambda t: t[:, :, :40].contiguous(), "capacity of key_codes must be a multiple of 16"),
        (7, lambda t: t.int(), "lengths must be int64"),
        (7, lambda t: t.cpu(), "lengths is not on the device of q"),
        (9, lambda t: torch.zeros(2, 2, 3, 64, dtype=torch.bfloat16).cuda(), "give front_keys and front_values"),
        (11, lambda t: t.float(), "latest_keys must have the dtype of q"),
    ],
)
def test_wrong_arguments_raise(index, change, message):
    arguments = on_cuda(problem())
    arguments[index] = change(arguments[index])
    with pytest.raises(RuntimeError, match=message):
        nvfp4.attend_codes(*arguments)
