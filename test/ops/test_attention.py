"""Attention to codes and appending to them: each instruction set against plain torch, over random problems."""

import pytest
import torch
from helpers.cached_attention import LENGTHS, SPEC, append_with, assert_close, capacity_of, problem
from helpers.instruction_sets import assert_same_bits, each_instruction_set, needs_library
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck

from nvfp4_tensor import QuantizeSpec
from nvfp4_tensor.numerics.hadamard import rotate_heads_back
from nvfp4_tensor.ops import composite

nvfp4 = torch.ops.nvfp4


def check(arguments, **options):
    expected = composite.attend_codes(*arguments, **options)
    for _ in each_instruction_set():
        assert_close(nvfp4.attend_codes(*arguments, **options), expected, arguments[0].dtype)
    return expected


@needs_library
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("size", [64, 96, 128, 256])
def test_lengths_and_sizes(length, size):
    check(problem(lengths=(length, max(length - 1, 0)), size=size))


@needs_library
@pytest.mark.parametrize("size, value_size", [(16, 16), (24, 40), (48, 32), (80, 80), (112, 112), (192, 128), (512, 8)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_odd_sizes_and_dtypes(size, value_size, dtype):
    arguments = problem(size=size, value_size=value_size, lengths=(70, 33), dtype=dtype)
    expected = check(arguments)
    assert not torch.equal(check(arguments, rotated=True), expected)


@needs_library
@pytest.mark.parametrize("tokens", [1, 2, 5, 16, 17, 40])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8])
def test_groups_and_new_tokens(tokens, group):
    check(problem(tokens=tokens, group=group, latest=45, lengths=(600, 90)), softcap=20.0)


@needs_library
@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 3), kv_heads=st.integers(1, 3), group=st.integers(1, 5), tokens=st.integers(1, 20),
    size=st.sampled_from([32, 64, 80, 96, 128]), latest=st.integers(0, 70), front=st.integers(0, 40),
    lengths=st.lists(st.sampled_from(LENGTHS), min_size=3, max_size=3), window=st.integers(0, 800),
    softcap=st.sampled_from([0.0, 3.0, 50.0]), dtype=st.sampled_from([torch.bfloat16, torch.float32]),
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


@needs_library
def test_nothing_to_see_is_zero():
    out = check(problem(tokens=3, lengths=(40, 40), latest=3, first=(0, 42)))
    assert torch.equal(out[1, :, :2], torch.zeros_like(out[1, :, :2])) and out[1, :, 2].any()


@needs_library
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["q", "latest key", "latest value", "front key", "key scale", "value scale"])
def test_what_is_not_finite_reaches_its_queries_only(value, where):
    arguments = problem(front=4, lengths=(50, 600))
    index = {
        "q": 0, "latest key": 11, "latest value": 12, "front key": 9, "key scale": 2, "value scale": 5,
    }[where]  # fmt: skip
    arguments[index][1, 0, 3 if index else 0, 1] = 0x7F if "scale" in where else value
    out = check(arguments)
    assert out[0].isfinite().all() and not out[1].isfinite().all()
    assert out[1, 3:].isfinite().all()  # of the other head of keys


@needs_library
def test_large_scores_saturate():
    arguments = problem(dtype=torch.float32)
    arguments[0] = arguments[0] * 1e4
    check(arguments)
    check(arguments, softcap=30.0)


@needs_library
@pytest.mark.parametrize("tokens", [1, 4, 30])
def test_thread_counts_give_the_same_bits(tokens):
    arguments = problem(batch=3, lengths=(5000, 700, 1), tokens=tokens, latest=33)
    before = torch.get_num_threads()
    try:
        for _ in each_instruction_set():
            results = []
            for threads in (1, 2, 3, 5):
                torch.set_num_threads(threads)
                results.append(nvfp4.attend_codes(*arguments))
            for other in results[1:]:
                assert_same_bits(other, results[0])
    finally:
        torch.set_num_threads(before)


@needs_library
def test_a_sequence_does_not_depend_on_others():
    arguments = problem(batch=3, lengths=(900, 40, 17), first=(3, 0, 5), front=2)
    together = nvfp4.attend_codes(*arguments)
    for b in range(3):
        alone = [t[b : b + 1] if isinstance(t, torch.Tensor) else t for t in arguments]
        assert_same_bits(nvfp4.attend_codes(*alone), together[b : b + 1])


@needs_library
def test_views_of_larger_buffers():
    arguments = problem(front=6, lengths=(40, 30))
    expected = nvfp4.attend_codes(*arguments)
    for i in (9, 10, 11, 12):
        buffer = torch.full((*arguments[i].shape[:2], 64, 64 + 8), torch.nan, dtype=torch.bfloat16)
        view = buffer[:, :, 5 : 5 + arguments[i].shape[2], :64]
        arguments[i] = view.copy_(arguments[i])
    arguments[0] = arguments[0].transpose(1, 2).contiguous().transpose(1, 2)
    assert_same_bits(nvfp4.attend_codes(*arguments), expected)


def test_it_is_attention_to_the_decoded_cache():
    """In torch's own words, for a batch of equal lengths."""
    arguments = problem(lengths=(100, 100), dtype=torch.float32, front=5, latest=20)
    q, *stored = arguments[:7]
    keys, values = composite.decode_heads(*stored[:3], 64, q.dtype), composite.decode_heads(*stored[3:], 64, q.dtype)
    keys = torch.cat((arguments[9], keys[:, :, :100], arguments[11]), dim=2)
    values = torch.cat((arguments[10], values[:, :, :100], arguments[12]), dim=2)
    expected = torch.nn.functional.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
    assert torch.allclose(nvfp4.attend_codes(*arguments), expected, rtol=1e-5, atol=1e-6)
    assert torch.allclose(composite.attend_codes(*arguments), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [24, 32, 64, 80, 96, 128])
def test_attention_to_rotated_keys_is_attention_to_the_keys(size):
    """The codes are of keys times H, as of queries: their products are those of the keys, up to what was rounded."""
    keys = torch.randn(1, 2, 100, size, generator=torch.Generator().manual_seed(3))
    keys[..., 5] *= 20  # a channel that a block of 16 shares its scale with
    found = {}
    for rotates in (False, True):
        arguments = problem(batch=1, lengths=(100,), size=size, dtype=torch.float32, latest=1)
        nvfp4.append_codes(
            keys, arguments[12].expand(-1, -1, 100, -1), SPEC.pack(), *arguments[1:7], torch.tensor([0]), rotates
        )
        stored = composite.decode_heads(*arguments[1:4], size, torch.float32)[:, :, :100]
        stored = rotate_heads_back(stored) if rotates else stored
        values = composite.decode_heads(*arguments[4:7], size, torch.float32)[:, :, :100]
        stored, values = torch.cat((stored, arguments[11]), 2), torch.cat((values, arguments[12]), 2)
        expected = torch.nn.functional.scaled_dot_product_attention(arguments[0], stored, values, enable_gqa=True)
        for attend in (nvfp4.attend_codes, composite.attend_codes):
            assert torch.allclose(attend(*arguments, rotated=rotates), expected, rtol=1e-4, atol=1e-5)
        found[rotates] = ((stored[:, :, :100] - keys)[..., torch.arange(size) != 5]).square().mean()
    assert size == 24 or found[True] < found[False]  # of 24 elements, 8 are rotated: half a block


# --- append ----------------------------------------------------------------------------------------------------------


SPECS = [QuantizeSpec(), QuantizeSpec(four_over_six="mse"), SPEC, QuantizeSpec(round_mode="away")]


@needs_library
@settings(max_examples=40, deadline=None)
@given(
    spec=st.sampled_from(SPECS), dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    tokens=st.sampled_from([0, 1, 2, 15, 16, 63, 64, 65, 130]), size=st.sampled_from([16, 24, 64, 80, 128, 256]),
    value_size=st.sampled_from([16, 40, 64]), starts=st.lists(st.integers(0, 30), min_size=2, max_size=2),
    rotates=st.booleans(), seed=st.integers(0, 100),
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
    for _ in each_instruction_set():
        for got, right in zip(append_with(nvfp4.append_codes, *arguments), expected, strict=True):
            assert torch.equal(got, right)


@needs_library
@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_append_of_any_magnitude(dtype, rotates):
    tiny, most = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    sizes = torch.tensor([0.0, tiny / 4, tiny, 1e-4, 1.0, most / 4]).view(1, 1, -1, 1)
    keys = (torch.randn(1, 2, 6, 64, generator=torch.Generator().manual_seed(0)).clamp(-3.9, 3.9) * sizes).to(dtype)
    arguments = keys, keys, QuantizeSpec(), [3], 16, rotates
    for got, right in zip(
        append_with(nvfp4.append_codes, *arguments), append_with(composite.append_codes, *arguments), strict=True
    ):
        assert torch.equal(got, right)


def test_opcheck():
    opcheck(nvfp4.attend_codes.default, tuple(problem(front=3, first=(1, 0))), {"softcap": 20.0, "window": 50})
    opcheck(nvfp4.attend_codes.default, tuple(problem(value_size=32)))
    keys, values = torch.randn(2, 3, 5, 64), torch.randn(2, 3, 5, 32)
    stored = append_with(nvfp4.append_codes, keys, values, SPEC, [0, 1], 32)
    opcheck(nvfp4.append_codes.default, (keys, values, SPEC.pack(), *stored, torch.tensor([1, 2])))


@needs_library
@pytest.mark.parametrize(
    "index, change, message",
    [
        (0, lambda t: t.double(), "q must be bfloat16, float16 or float32"),
        (0, lambda t: t[0], "q must be"),
        (0, lambda t: t[:, :5], "query heads a multiple"),
        (1, lambda t: t[:, :, :40], "contiguous bytes|multiple of 16"),
        (1, lambda t: t[:, :, :40].contiguous(), "capacity of key_codes must be a multiple of 16"),
        (1, lambda t: t[..., :16].contiguous(), "key_codes must be"),
        (2, lambda t: t[..., :2].contiguous(), "key_scale must be"),
        (3, lambda t: t.float(), "key_factor must be contiguous bytes"),
        (7, lambda t: t + 1000, "lengths must be from 0 to the capacity"),
        (7, lambda t: t - 1000, "lengths must be from 0 to the capacity"),
        (7, lambda t: t.int(), "lengths must be int64"),
        (8, lambda t: torch.tensor([-1, 0]), "first must not be negative"),
        (9, lambda t: torch.zeros(2, 2, 3, 64, dtype=torch.bfloat16), "give front_keys and front_values"),
        (11, lambda t: t.float(), "latest_keys must have the dtype of q"),
        (11, lambda t: t[:, :, :0], "as many keys as values"),
        (12, lambda t: t[:, :1], "latest_values must be"),
    ],
)
def test_wrong_arguments_raise(index, change, message):
    arguments = problem()
    arguments[index] = change(arguments[index])
    with pytest.raises(RuntimeError, match=message):
        nvfp4.attend_codes(*arguments)


@needs_library
def test_append_refuses_what_does_not_fit():
    keys = torch.randn(2, 3, 5, 64)
    with pytest.raises(RuntimeError, match="do not fit into a capacity of 16"):
        append_with(nvfp4.append_codes, keys, keys, SPEC, [0, 12], 16)
    with pytest.raises(RuntimeError, match="do not fit into a capacity of 16"):
        append_with(nvfp4.append_codes, keys, keys, SPEC, [0, -1], 16)
    with pytest.raises(RuntimeError, match="rounds to nearest"):
        append_with(nvfp4.append_codes, keys, keys, QuantizeSpec(round_mode="stochastic"), [0, 0], 16)
    with pytest.raises(RuntimeError, match="values must be"):
        append_with(nvfp4.append_codes, keys, keys[:, :2], SPEC, [0, 0], 16)
