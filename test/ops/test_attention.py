"""Attention to codes and appending to them against plain torch: on each instruction set, and on a GPU."""

import math

import pytest
import torch
from helpers.instruction_sets import assert_same_bits, each_instruction_set
from helpers.repeats import captured
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nvfp4_tensor import QuantizeSpec
from nvfp4_tensor.numerics.hadamard import rotate_heads_back
from nvfp4_tensor.ops.composite.attention import decode_heads
from nvfp4_tensor.ops.schemas import plain

nvfp4 = torch.ops.nvfp4
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SIZES = [64, 96, 128, 256]
random = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


SPEC = QuantizeSpec(scale_search="mse")
LENGTHS = [0, 1, 15, 16, 17, 31, 33, 127, 128, 129, 511, 513, 1100]


def capacity_of(tokens):
    return -(-tokens // 16) * 16


def random_bytes(batch, heads, capacity, size, generator):
    """Return codes, scales and factors of random rows, as a cache holds them, with NaN in what is not in use."""
    blocks = -(-size // 16)
    codes = torch.randint(256, (batch, heads, capacity, blocks * 8), dtype=torch.uint8, generator=generator)
    scale = torch.full((batch, heads, capacity, blocks), 0x7F, dtype=torch.uint8)  # NaN
    factor = torch.full((batch, heads, capacity), 0xFF, dtype=torch.uint8)
    return codes, scale, factor


def problem(batch=2, kv_heads=2, group=3, tokens=1, size=64, value_size=None, lengths=(100, 100), latest=20, front=0,
            dtype=torch.bfloat16, seed=0, first=None, slack=0, spread=3.0):  # fmt: skip
    """Return the arguments of attend_codes, whose codes come from append_codes."""
    generator = torch.Generator().manual_seed(seed)

    def randn(heads, count, columns):
        sizes = torch.exp(spread * torch.rand((batch, heads, count, 1), generator=generator) - spread)
        return (torch.randn((batch, heads, count, columns), generator=generator) * sizes).to(dtype)

    value_size = value_size or size
    capacity = capacity_of(max(lengths) + slack)
    stored = [random_bytes(batch, kv_heads, capacity, n, generator) for n in (size, value_size)]
    keys, values = randn(kv_heads, max(lengths), size), randn(kv_heads, max(lengths), value_size)
    for b, length in enumerate(lengths):
        for x, (codes, scale, factor) in zip((keys, values), stored, strict=True):
            if length:
                rows = (x[b : b + 1, :, :length], x[b : b + 1, :, :length])
                into = tuple(t[b : b + 1] for t in (codes, scale, factor))
                plain.append_codes(*rows, SPEC.pack(), *into, *into, torch.zeros(1, dtype=torch.int64))
    dense = [randn(kv_heads, latest, n) for n in (size, value_size)]
    at_front = [randn(kv_heads, front, n) for n in (size, value_size)] if front else [None, None]
    first = None if first is None else torch.tensor(first)
    q = (randn(kv_heads * group, tokens, size).float() * 3).to(dtype)
    return [q, *stored[0], *stored[1], torch.tensor(lengths), first, *at_front, *dense, 1 / math.sqrt(size)]


def assert_close(got, expected, dtype):
    """Within a bound of float32 sums, and one step of dtype. NaN where the reference has it."""
    assert got.dtype == dtype and got.shape == expected.shape
    got, expected = got.float(), expected.float()
    assert torch.equal(got.isnan(), expected.isnan())
    got, expected = got.nan_to_num(0.0), expected.nan_to_num(0.0)
    step = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-23}[dtype]
    bound = (step + 2e-5) * expected.abs() + 2e-5 * expected.abs().amax() + (1e-7 if dtype == torch.float16 else 0)
    assert ((got - expected).abs() <= bound).all(), (got - expected).abs().max()


def append_with(append, keys, values, spec, starts, capacity, rotates=False):
    generator = torch.Generator().manual_seed(5)
    batch, heads = keys.shape[:2]
    stored = [*random_bytes(batch, heads, capacity, keys.shape[3], generator)]
    stored += random_bytes(batch, heads, capacity, values.shape[3], generator)
    append(keys, values, spec.pack(), *stored, torch.tensor(starts), rotates)
    return stored


def on(device, arguments):
    return [t.to(device) if isinstance(t, torch.Tensor) else t for t in arguments]


def check(device, arguments, **options):
    expected, moved = plain.attend_codes(*arguments, **options), on(device, arguments)
    for _ in each_instruction_set() if device == "cpu" else (device,):
        out = nvfp4.attend_codes(*moved, **options).cpu()
        assert_close(out, expected, arguments[0].dtype)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
def test_odd_sizes_and_large_scores(kernels, dtype):
    """Scores of a few thousand, where one weight has nearly everything."""
    for size, value_size in [(16, 16), (24, 40), (48, 32), (80, 80), (112, 112), (192, 128), (512, 8)]:
        arguments = problem(size=size, value_size=value_size, lengths=(70, 33), dtype=dtype)
        assert not torch.equal(check(kernels, arguments, rotated=True), check(kernels, arguments))
    for softcap in (0.0, 30.0):
        arguments = problem(dtype=dtype)
        arguments[0] = arguments[0] * 1e4
        check(kernels, arguments, softcap=softcap)


@random
@given(
    batch=st.integers(1, 3), kv_heads=st.integers(1, 3), group=st.sampled_from([1, 2, 3, 4, 5, 7, 8]),
    tokens=st.integers(1, 20) | st.just(40), size=st.sampled_from([32, 64, 80, 96, 128, 256]),
    latest=st.integers(0, 70), front=st.integers(0, 40),
    lengths=st.lists(st.sampled_from(LENGTHS), min_size=3, max_size=3), window=st.integers(0, 800),
    softcap=st.sampled_from([0.0, 3.0, 50.0]), dtype=st.sampled_from(DTYPES),
    first=st.lists(st.integers(0, 700), min_size=3, max_size=3) | st.none(), slack=st.integers(0, 100),
    seed=st.integers(0, 1000), rotated=st.booleans(),
)  # fmt: skip
def test_random_problems(
    kernels, batch, kv_heads, group, tokens, size, latest, front, lengths, window, softcap, dtype, first, slack, seed,
    rotated,
):  # fmt: skip
    arguments = problem(
        batch, kv_heads, group, tokens, size, None, lengths[:batch], latest + tokens, front, dtype, seed,
        first and first[:batch], slack,
    )  # fmt: skip
    check(kernels, arguments, softcap=softcap, window=window, rotated=rotated)


@pytest.mark.parametrize("size, dtype", zip(SIZES, (*DTYPES, torch.bfloat16), strict=True))
def test_dense_tokens_before_the_first_may_be_anything(kernels, size, dtype):
    arguments = problem(front=20, lengths=(0, 40), size=size, first=(25, 3), dtype=dtype)
    expected = plain.attend_codes(*arguments)
    for front, latest in ((9, 11), (10, 12)):  # keys, values
        arguments[front][0], arguments[front][1, :, :3], arguments[latest][0, :, :5] = torch.nan, torch.inf, torch.nan
    moved = on(kernels, arguments)
    for _ in each_instruction_set() if kernels == "cpu" else (kernels,):
        assert_close(nvfp4.attend_codes(*moved).cpu(), expected, dtype)


PLACES = {"q": 0, "latest key": 11, "latest value": 12, "front key": 9, "key scale": 2, "value scale": 5}


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("size", [64, 80, 96, 128])
def test_what_is_not_finite_reaches_its_queries_only(kernels, where, size):
    for value in (torch.nan, torch.inf, -torch.inf):
        arguments, index = problem(front=4, lengths=(50, 600), size=size), PLACES[where]
        arguments[index][1, 0, 3 if index else 0, 1] = 0x7F if "scale" in where else value
        out = check(kernels, arguments)
        assert out[0].isfinite().all() and not out[1].isfinite().all()
        assert out[1, 3:].isfinite().all()  # of the other head of keys


@pytest.mark.parametrize("tokens, size", [(1, 128), (4, 64), (30, 128), (1, 96)])
def test_bits_repeat_on_any_number_of_threads(kernels, tokens, size):
    arguments = on(kernels, problem(batch=3, lengths=(5000, 700, 1), tokens=tokens, latest=33, size=size))
    for _ in each_instruction_set() if kernels == "cpu" else (kernels,):
        first = nvfp4.attend_codes(*arguments)
        for threads in (2, 3, 5):
            torch.set_num_threads(threads)
            assert_same_bits(nvfp4.attend_codes(*arguments), first)


def test_a_sequence_does_not_depend_on_others(device):
    arguments = on(device, problem(batch=3, lengths=(900, 40, 17), first=(3, 0, 5), front=2))
    together = nvfp4.attend_codes(*arguments)
    for b in range(3):
        alone = [t[b : b + 1] if isinstance(t, torch.Tensor) else t for t in arguments]
        out = nvfp4.attend_codes(*alone)
        if device == "cpu":
            assert_same_bits(out, together[b : b + 1])
        else:  # which divides one sequence's work among more blocks
            assert_close(out, together[b : b + 1], out.dtype)


def test_room_in_a_cache_changes_no_bit(device):
    """Work is divided by what a sequence sees, not by what its cache could hold."""
    for lengths, tokens, size in [((40, 7), 1, 64), ((900, 16), 1, 128), ((1800, 300), 5, 96), ((700, 2), 2, 80)]:
        arguments = on(device, problem(lengths=lengths, tokens=tokens, size=size, front=4, first=(3, 0)))
        expected = nvfp4.attend_codes(*arguments)
        for room in (16, 480, 20_000):
            roomy = [torch.nn.functional.pad(t, (0, 0) * (t.ndim - 3) + (0, room), value=0xFF) for t in arguments[1:7]]
            assert_same_bits(nvfp4.attend_codes(arguments[0], *roomy, *arguments[7:]), expected)


def test_views_of_larger_buffers(device):
    arguments = on(device, problem(front=6, lengths=(40, 30)))
    expected = nvfp4.attend_codes(*arguments)
    for i in (9, 10, 11, 12):
        buffer = torch.full((*arguments[i].shape[:2], 64, 64 + 8), torch.nan, dtype=torch.bfloat16, device=device)
        arguments[i] = buffer[:, :, 5 : 5 + arguments[i].shape[2], :64].copy_(arguments[i])
    arguments[0] = arguments[0].transpose(1, 2).contiguous().transpose(1, 2)
    assert_same_bits(nvfp4.attend_codes(*arguments), expected)


@pytest.mark.parametrize("size", [24, 64, 80, 128])
def test_it_is_attention_to_the_decoded_cache(size):
    """In torch's own words. Codes of rotated keys are of keys times H, as of queries: the products are the same."""
    keys = torch.randn(1, 2, 100, size, generator=torch.Generator().manual_seed(3))
    keys[..., 5] *= 20  # a channel that a block of 16 shares its scale with
    found = {}
    for rotates in (False, True):
        arguments = problem(batch=1, lengths=(100,), size=size, dtype=torch.float32, latest=1, front=5)
        nvfp4.append_codes(
            keys, arguments[12].expand(-1, -1, 100, -1), SPEC.pack(), *arguments[1:7], torch.tensor([0]), rotates
        )
        stored = decode_heads(*arguments[1:4], size, torch.float32)[:, :, :100]
        stored = rotate_heads_back(stored) if rotates else stored
        values = decode_heads(*arguments[4:7], size, torch.float32)[:, :, :100]
        stored = torch.cat((arguments[9], stored, arguments[11]), 2)
        values = torch.cat((arguments[10], values, arguments[12]), 2)
        expected = torch.nn.functional.scaled_dot_product_attention(arguments[0], stored, values, enable_gqa=True)
        for attend in (nvfp4.attend_codes, plain.attend_codes):
            assert torch.allclose(attend(*arguments, rotated=rotates), expected, rtol=1e-4, atol=1e-5)
        found[rotates] = ((stored[:, :, 5:105] - keys)[..., torch.arange(size) != 5]).square().mean()
    assert size == 24 or found[True] < found[False]  # of 24 elements, 8 are rotated: half a block


# --- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_long_contexts_in_many_splits():
    check("cuda", problem(batch=1, kv_heads=1, group=4, lengths=(30000,), size=128, slack=999), rotated=True)
    check("cuda", problem(batch=12, kv_heads=6, group=2, lengths=(1900,) * 12, size=128), rotated=True)


@pytest.mark.gpu
def test_a_graph_follows_lengths_on_the_device():
    """What was captured for one length serves others."""
    arguments = on("cuda", problem(lengths=(1100, 900), size=128))
    lengths = arguments[7] = arguments[7].clone()
    nvfp4.attend_codes(*arguments)
    torch.cuda.synchronize()
    graph, out = captured(lambda: nvfp4.attend_codes(*arguments))
    for new in ((0, 1), (17, 900), (1100, 512)):
        lengths.copy_(torch.tensor(new))
        graph.replay()
        assert_same_bits(out, nvfp4.attend_codes(*arguments))
        assert_close(out.cpu(), plain.attend_codes(*on("cpu", arguments)), torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_settled_codes_are_read_while_the_kernel_before_writes_others(size, dtype):
    """Behind ``lengths``, as a step's graph does, which also writes what is dense."""
    arguments = on("cuda", problem(batch=1, group=4, lengths=(1100,), size=size, slack=40, dtype=dtype, latest=65))
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


@pytest.mark.gpu
def test_lengths_that_the_host_cannot_look_at():
    """Those beyond the capacity are cut; those on the host are refused."""
    arguments = on("cuda", problem(lengths=(160, 160)))
    expected = nvfp4.attend_codes(*arguments)
    arguments[7] = torch.tensor([10**12, 161], device="cuda")
    assert_same_bits(nvfp4.attend_codes(*arguments), expected)
    arguments[7] = arguments[7].cpu()
    with pytest.raises(RuntimeError, match="lengths is not on the device of q"):
        nvfp4.attend_codes(*arguments)


# --- append ----------------------------------------------------------------------------------------------------------


def appended_on(device):
    """Return append_codes for tensors on the CPU, which another device computes."""

    def append(keys, values, spec, *stored_starts_rotates):
        *stored, starts, rotates = stored_starts_rotates
        there = on(device, stored)
        nvfp4.append_codes(keys.to(device), values.to(device), spec, *there, starts.to(device), rotates)
        for t, new in zip(stored, there, strict=True):
            t.copy_(new)

    return append


def check_append(device, *arguments):
    expected = append_with(plain.append_codes, *arguments)
    for _ in each_instruction_set() if device == "cpu" else (device,):
        for got, right in zip(append_with(appended_on(device), *arguments), expected, strict=True):
            assert torch.equal(got, right)


@random
@given(
    spec=st.sampled_from([
        QuantizeSpec(), QuantizeSpec(four_over_six="mse"), SPEC, QuantizeSpec(round_mode="away"),
        QuantizeSpec(scale_search="mse", scale_rounding="up"),
    ]),
    dtype=st.sampled_from(DTYPES), tokens=st.sampled_from([0, 1, 2, 15, 16, 63, 64, 65, 130]),
    size=st.sampled_from([16, 24, 64, 80, 128, 256, 512]), value_size=st.sampled_from([16, 40, 64]),
    starts=st.lists(st.integers(0, 30), min_size=2, max_size=2), rotates=st.booleans(), seed=st.integers(0, 100),
)  # fmt: skip
def test_append_has_the_bits_of_plain_torch(kernels, spec, dtype, tokens, size, value_size, starts, rotates, seed):
    generator = torch.Generator().manual_seed(seed)
    keys, values = (
        (torch.randn((2, 3, tokens, n), generator=generator)
         * 2.0 ** torch.randint(-40, 14, (2, 3, tokens, 1), generator=generator)).to(dtype)
        for n in (size, value_size)
    )  # fmt: skip
    if tokens:
        keys[1, 2, 0] = 0
        keys[0, 1, -1, 3], values[1, 0, 0, 5], values[0, 2, 0, 0] = torch.nan, torch.inf, -torch.inf
    check_append(kernels, keys, values, spec, starts, capacity_of(tokens + 30), rotates)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotates", [False, True])
def test_append_of_any_magnitude_and_of_views(kernels, dtype, rotates):
    """Keys and values as transformers has them: heads within rows of tokens."""
    tiny, most = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    sizes = torch.tensor([0.0, tiny / 4, tiny, 1e-4, 1.0, most / 4]).view(1, 1, -1, 1)
    keys = (torch.randn(1, 2, 6, 64).clamp(-3.9, 3.9) * sizes).to(dtype)
    check_append(kernels, keys, keys, QuantizeSpec(), [3], 16, rotates)
    states = torch.randn(2, 33, 4 * 128).to(dtype)
    for skip in (0, 1):
        heads = states[..., skip : skip + 3 * 128].unflatten(-1, (3, 128)).transpose(1, 2)
        check_append(kernels, heads, heads, SPEC, [0, 5], 48, rotates)


@pytest.mark.gpu
def test_append_writes_nothing_beyond_the_capacity():
    keys = torch.randn(2, 3, 5, 64).bfloat16()
    within = append_with(appended_on("cuda"), keys[:, :, :2], keys[:, :, :2], SPEC, [14, 14], 16)
    beyond = append_with(appended_on("cuda"), keys, keys, SPEC, [14, 14], 16)
    for got, right in zip(beyond, within, strict=True):
        assert torch.equal(got, right)


# --- what is refused -------------------------------------------------------------------------------------------------

ONLY_ON_CPU = {"lengths must be from 0 to the capacity", "first must not be negative"}  # a GPU cuts them


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
def test_wrong_arguments_raise(kernels, index, change, message):
    if kernels == "cuda" and message in ONLY_ON_CPU:
        pytest.skip("the host does not wait for a GPU to look at them")
    arguments = problem()
    arguments[index] = change(arguments[index])
    with pytest.raises(RuntimeError, match=message):
        nvfp4.attend_codes(*on(kernels, arguments))


@pytest.mark.parametrize("device", ["cpu"])
def test_append_refuses_what_does_not_fit(kernels):
    keys = torch.randn(2, 3, 5, 64)
    for values, spec, starts, message in (
        (keys, SPEC, [0, 12], "do not fit into a capacity of 16"),
        (keys, SPEC, [0, -1], "do not fit into a capacity of 16"),
        (keys, QuantizeSpec(round_mode="stochastic"), [0, 0], "rounds to nearest"),
        (keys[:, :2], SPEC, [0, 0], "values must be"),
    ):
        with pytest.raises(RuntimeError, match=message):
            append_with(nvfp4.append_codes, keys, values, spec, starts, 16)
