"""The ops of one token's step, against the modules of transformers and against plain torch."""

import copy
import itertools
import types

import pytest
import torch
from helpers.repeats import captured

pytest.importorskip("transformers")
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.olmo2.modeling_olmo2 import apply_rotary_pos_emb as rotate_in_float32
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as rotate_a_part

from nvfp4_tensor import NVFP4Tensor, QuantizeSpec
from nvfp4_tensor.ops.composite.step import Activation

nvfp4 = torch.ops.nvfp4
NORMS = {
    "llama": (LlamaRMSNorm, {}),
    "gemma": (Gemma2RMSNorm, {"offset": 1.0, "round_before_weight": False}),
    "olmo": (Olmo2RMSNorm, {"round_before_weight": False}),
}
DTYPES = [torch.bfloat16, torch.float16]


def assert_rounded_alike(ours, expected, steps=1):
    """Equal but for sums in another order: a few elements are one or two steps of their dtype apart."""
    assert ours.shape == expected.shape and ours.dtype == expected.dtype
    ulp = torch.finfo(ours.dtype).eps * steps
    torch.testing.assert_close(
        ours.float(), expected.float(), rtol=ulp, atol=ulp * float(expected.detach().abs().max()) / 16
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", NORMS)
def test_norms_are_those_of_transformers(device, family, dtype):
    kind, how = NORMS[family]
    for rows, columns in [(1, 4096), (3, 100), (16, 2560), (2, 16384), (1, 7)]:
        norm = kind(columns, eps=1e-5).to(device, dtype)
        torch.nn.init.normal_(norm.weight, 1.0, 0.3)
        x, residual = torch.randn(2, rows, columns, device=device, dtype=dtype)
        y, total = nvfp4.rms_norm(x, residual, norm.weight.data, 1e-5, **how)
        assert torch.equal(total, residual + x)
        assert_rounded_alike(y, norm(total), 2)
        small = x * 0.01  # beside which epsilon is large
        y, total = nvfp4.rms_norm(small, None, norm.weight.data, 1e-5, **how)
        assert total.numel() == 0
        assert_rounded_alike(y, norm(small), 2)
    wide = gpt_oss.GptOssRMSNorm(96).to(device)  # whose weight is float32
    torch.nn.init.normal_(wide.weight, 1.0, 0.3)
    x = torch.randn(2, 96, device=device, dtype=torch.bfloat16)
    assert_rounded_alike(nvfp4.rms_norm(x, None, wide.weight.data, 1e-6, 0.0, False)[0], wide(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [96, 2048])
def test_a_norm_before_the_sum(device, dtype, columns):
    """Gemma 2: norm(x) is added, and normed again; OLMo 2: it is only added; Granite: x is multiplied."""
    x, residual = torch.randn(2, 5, columns, device=device, dtype=dtype)
    first, second = torch.rand(2, columns, device=device, dtype=dtype)
    how = {"offset": 1.0, "round_before_weight": False}
    (inner, _), (y, total) = (
        nvfp4.rms_norm(x, None, first, 1e-6, **how),
        nvfp4.rms_norm(x, residual, second, 1e-6, **how, first_weight=first),
    )
    assert torch.equal(total, residual + inner)
    assert torch.equal(y, nvfp4.rms_norm(total, None, second, 1e-6, **how)[0])
    y, total = nvfp4.rms_norm(x, residual, None, 1e-6, **how, first_weight=first)
    assert y.numel() == 0 and torch.equal(total, residual + inner)
    _, total = nvfp4.rms_norm(x, residual, second, 1e-6, multiplier=0.22)
    assert torch.equal(total, residual + x * 0.22)


class Token:
    """Random queries, keys and values of a token per row, and a cache with random tokens before it."""

    def __init__(self, device, dtype, batch=2, heads=6, kv_heads=2, dim=64, length=48, rotary=None, angles=None):
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.qkv = torch.randn(batch, (heads + 2 * kv_heads) * dim, device=device, dtype=dtype)
        self.keys, self.values = torch.randn(2, batch, kv_heads, length, dim, device=device, dtype=dtype)
        angle = torch.randn(batch, rotary or dim, device=device) * 3
        self.cos, self.sin = angle.cos().to(angles or dtype), angle.sin().to(angles or dtype)
        self.norm = (1e-5, 0.0, True)
        self.q_norm = self.k_norm = None
        self.more = {"scaling": dim**-0.5}

    def attend(self, position, **more):
        """(result, keys and values behind it)."""
        cache = self.keys.clone(), self.values.clone()
        if isinstance(position, int):
            position = torch.tensor([position], device=self.qkv.device)
        how = {**self.more, **more}
        scaling = how.pop("scaling")
        before = (self.qkv, self.q_norm, self.k_norm, *self.norm, self.cos, self.sin)
        return nvfp4.attend_one(*before, *cache, position, self.heads, scaling, **how), *cache

    def parts(self):
        sizes = [n * self.dim for n in (self.heads, self.kv_heads, self.kv_heads)]
        return [x.view(len(x), -1, self.dim) for x in self.qkv.split(sizes, -1)]

    def expected(self, q, k, v, position, window=0, softcap=0.0, sinks=None):
        """Attention in float64 of q, k and v that are normed and rotated."""
        keys, values = self.keys.clone(), self.values.clone()
        keys[:, :, position], values[:, :, position] = k, v
        first = max(position - window + 1, 0) if window else 0
        seen = [each[:, :, first : position + 1].double() for each in (keys, values)]
        grouped = q.double().view(len(q), self.kv_heads, -1, self.dim)
        scores = grouped @ seen[0].mT * self.more["scaling"]
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            sinks = sinks.double().view(1, self.kv_heads, -1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], -1)
        weights = scores.softmax(-1)[..., : position + 1 - first]
        return (weights @ seen[1]).flatten(1), keys, values

    def check(self, position, q, k, v, **more):
        y, keys, values = self.attend(position, **more)
        expected, expected_keys, expected_values = self.expected(q, k, v, position, **more)
        assert y.dtype == self.qkv.dtype
        assert torch.equal(values, expected_values)
        written = (keys[:, :, position], expected_keys[:, :, position])
        assert_rounded_alike(*written, 2)
        expected_keys[:, :, position] = keys[:, :, position]
        assert torch.equal(keys, expected_keys)
        tolerance = 4 * torch.finfo(y.dtype).eps
        torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())


def empty_codes(like, capacity=16):
    """Codes of keys and values, all bytes 0xAA, in the heads of dense ones."""
    batch, heads, _, dim = like.shape
    blocks = -(-dim // 16)
    shapes = ((capacity, blocks * 8), (capacity, blocks), (capacity,))
    return [torch.full((batch, heads, *s), 0xAA, dtype=torch.uint8, device=like.device) for s in shapes * 2]


@pytest.mark.parametrize("dim, norms", [(64, None), (96, "heads"), (128, "heads"), (128, "all"), (72, None)])
@pytest.mark.parametrize("position", [0, 46, 47, 1000])
def test_placing_is_attention_without_it_and_append(device, dim, norms, position):
    """What is written is what attend_one writes into a ring, and append_codes; queries, those that it attends with."""
    for dtype, rotate in itertools.product(DTYPES, (False, True)):
        token = Token(device, dtype, dim=dim)
        if norms:
            columns = (dim, dim) if norms == "heads" else (6 * dim, 2 * dim)
            token.q_norm, token.k_norm = (torch.rand(n, device=device, dtype=dtype) for n in columns)
        keys, values = token.keys.clone(), token.values.clone()
        at = torch.tensor([position], device=device)
        before = (token.qkv, token.q_norm, token.k_norm, *token.norm, token.cos, token.sin)
        spec = QuantizeSpec(scale_search="mse").pack()
        coded, expected_codes = empty_codes(keys), empty_codes(keys)
        starts = torch.arange(len(keys), device=device) + 5
        q = nvfp4.place_one(*before, keys, values, at, token.heads, spec, *coded, starts, rotate)
        _, expected_keys, expected_values = token.attend(at, window=48)
        assert torch.equal(keys, expected_keys) and torch.equal(values, expected_values)
        slot = (position + 1) % 48
        oldest = token.keys[:, :, slot, None], token.values[:, :, slot, None]
        nvfp4.append_codes(*oldest, spec, *expected_codes, starts, rotate)
        for got, right in zip(coded, expected_codes, strict=True):
            assert torch.equal(got, right)
        # A head of queries as one of keys, which are written as queries are returned.
        both = torch.cat([token.qkv[:, : 6 * dim]] * 3, dim=1)
        ring = torch.zeros(2, 2, 6, 3, dim, device=device, dtype=dtype)
        again = (both, token.q_norm, token.q_norm, *token.norm, token.cos, token.sin)
        more = 6, spec, *empty_codes(ring[0]), starts, rotate
        repeated = nvfp4.place_one(*again, *ring, torch.tensor([1], device=device), *more)
        assert torch.equal(repeated, q) and torch.equal(ring[0, :, :, 1], q[:, :, 0])


def rotated(token, rotate=apply_rotary_pos_emb):
    q, k, v = token.parts()
    q, k = rotate(q[:, :, None], k[:, :, None], token.cos[:, None], token.sin[:, None])
    return q[:, :, 0], k[:, :, 0], v


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention(device, dtype):
    for position in (0, 1, 15, 16, 47):
        token = Token(device, dtype)
        token.check(position, *rotated(token))
        token.check(position, *rotated(token), window=8)
        token.check(position, *rotated(token), softcap=2.0)
        token.check(position, *rotated(token), sinks=torch.randn(6, device=device, dtype=dtype))
        token.cos = token.sin = None
        token.check(position, *token.parts())


@pytest.mark.parametrize("length, position, window", [
    (48, 40, 0), (48, 40, 16), (48, 1000, 16), (1400, 1300, 0), (1400, 1300, 700),
])  # fmt: skip
@pytest.mark.parametrize("dim", [64, 128])
def test_rows_that_start_later(device, dim, length, position, window):
    """A row has the result of a cache that has only what it sees; all else may be anything."""
    starts = [0, position - 35, position - 1, position]
    token = Token(device, torch.bfloat16, batch=4, dim=dim, length=length)
    seen = []
    for row, start in enumerate(starts):
        first = max(start, position - window + 1 if window else 0)
        slots = torch.arange(first, position, device=device) % length
        seen.append((token.keys[row, :, slots], token.values[row, :, slots]))
        for cache, kept in zip((token.keys, token.values), seen[-1], strict=True):
            cache[row] = torch.nan
            cache[row, :, slots] = kept
    y, *_ = token.attend(position, window=window, softcap=20.0, starts=torch.tensor(starts, device=device))
    for row, (keys, values) in enumerate(seen):
        alone = copy.copy(token)
        alone.qkv, alone.cos, alone.sin = (t[row : row + 1] for t in (token.qkv, token.cos, token.sin))
        new = torch.zeros_like(token.keys[:1, :, :1])
        alone.keys, alone.values = (torch.cat((each[None], new), 2) for each in (keys, values))
        expected, *_ = alone.attend(keys.shape[1], softcap=20.0)
        torch.testing.assert_close(y[row : row + 1], expected, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotations(device, dtype):
    """Of a part of each head; in float32; one for all rows."""
    part = Token(device, dtype, dim=96, rotary=72)
    part.check(20, *rotated(part, rotate_a_part))
    wide = Token(device, dtype, angles=torch.float32)
    wide.check(20, *rotated(wide, rotate_in_float32))
    once = Token(device, dtype)
    once.cos, once.sin = once.cos[:1], once.sin[:1]
    once.check(20, *rotated(once))


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_heads_and_long_caches(device, dim):
    for heads, kv_heads in [(1, 1), (4, 4), (8, 1), (32, 8), (24, 3), (64, 8), (7, 1)]:
        token = Token(device, torch.bfloat16, heads=heads, kv_heads=kv_heads, dim=dim)
        token.check(37, *rotated(token))
    if dim == 128:
        for batch, position in itertools.product((1, 3, 16) if device == "cuda" else (1,), (700, 4095, 4999)):
            token = Token(device, torch.bfloat16, batch, heads=8, kv_heads=2, dim=128, length=5000)
            token.check(position, *rotated(token))
            token.check(position, *rotated(token), window=1024, softcap=50.0)


@pytest.mark.gpu
@pytest.mark.parametrize("batch, heads, kv_heads, dim", [(1, 8, 2, 64), (1, 32, 8, 128), (3, 4, 4, 96), (24, 8, 8, 64)])
def test_room_in_a_cache_changes_no_bit(batch, heads, kv_heads, dim):
    """Blocks share what is seen, not what a cache could hold, and their sums are added in one order, by two kernels."""
    for position, window in [(20, 0), (1300, 0), (1300, 1024), (10_000, 0)]:
        token = Token("cuda", torch.bfloat16, batch, heads, kv_heads, dim, length=position + 1)
        expected, *_ = token.attend(position, window=window)
        keys, values = token.keys, token.values
        for room in (3, 500, 9000, 60_000 // batch):
            token.keys, token.values = (torch.nn.functional.pad(t, (0, 0, 0, room)) for t in (keys, values))
            assert torch.equal(token.attend(position, window=window)[0], expected), (position, room)


@pytest.mark.parametrize("family", NORMS)
@pytest.mark.parametrize("over_heads", [False, True])
def test_norms_of_queries_and_keys(device, family, over_heads):
    kind, how = NORMS[family]
    token = Token(device, torch.bfloat16)
    norms = [
        kind(token.dim * (heads if over_heads else 1), eps=1e-5).to(device, torch.bfloat16)
        for heads in (token.heads, token.kv_heads)
    ]
    for norm in norms:
        torch.nn.init.normal_(norm.weight, 1.0, 0.3)
    token.q_norm, token.k_norm = (norm.weight.data for norm in norms)
    token.norm = (1e-5, how.get("offset", 0.0), how.get("round_before_weight", True))
    q, k, v = token.parts()
    q, k = (norm(x.flatten(1) if over_heads else x).view(x.shape) for norm, x in zip(norms, (q, k), strict=True))
    q, k = apply_rotary_pos_emb(q, k, token.cos, token.sin)
    token.check(33, q, k, v)


@pytest.mark.parametrize("sizes, length, ring_length, window, positions", [
    ((6, 2, 64), 100, 16, 16, (15, 16, 50, 99)), ((6, 2, 64), 100, 24, 16, (15, 16, 50, 99)),
    ((64, 32, 128), 1400, 520, 500, (519, 1300)), ((32, 2, 256), 1400, 520, 500, (519, 1300)),
    ((9, 3, 64), 1400, 520, 500, (519, 1300)), ((16, 2, 96), 1400, 520, 500, (519, 1300)),
], ids=str)  # fmt: skip
def test_a_window_in_a_ring(device, sizes, length, ring_length, window, positions):
    """A cache no shorter than the window needs no more slots than its own.

    More blocks than a GPU takes at once, and tiles of which one lies across the ring's end.
    """
    batch = 6 if device == "cuda" else 1
    long, ring = (Token(device, torch.bfloat16, batch, *sizes, length=n) for n in (length, ring_length))
    ring.qkv, ring.cos, ring.sin = long.qkv, long.cos, long.sin
    for position in positions:
        slots = torch.arange(position - ring_length + 1, position + 1, device=device).clamp_min(0)
        for mine, all_of_them in ((ring.keys, long.keys), (ring.values, long.values)):
            mine[:, :, slots % ring_length] = all_of_them[:, :, slots]
        y, keys, _ = ring.attend(position, window=window)
        long.check(position, *rotated(long), window=window)
        expected, expected_keys, _ = long.attend(position, window=window)
        assert torch.equal(keys[:, :, position % ring_length], expected_keys[:, :, position])
        assert_rounded_alike(y, expected, 2)


def test_positions_and_what_is_not_a_number(device):
    """Each row has its position; one outside of the cache writes nothing; what no token sees does not matter."""
    token = Token(device, torch.bfloat16, batch=4)
    y, keys, values = token.attend(torch.tensor([3, 47, 0, 20], device=device))
    for row, position in enumerate([3, 47, 0, 20]):
        one, *caches = token.attend(position)
        assert torch.equal(y[row], one[row])
        assert torch.equal(keys[row], caches[0][row]) and torch.equal(values[row], caches[1][row])
    for position in (-1, 48, 2**40):
        y, keys, values = token.attend(position)
        assert y.isnan().all()
        assert torch.equal(keys, token.keys) and torch.equal(values, token.values)
    expected = token.attend(20, window=10)[0]
    for cache in (token.keys, token.values):
        cache[:, :, 21:] = cache[:, :, :11] = torch.nan
    assert torch.equal(token.attend(20, window=10)[0], expected)
    token = Token(device, torch.bfloat16)
    token.values[0, 1, 5, 7] = torch.nan
    y = token.attend(20)[0].view(2, 6, 64)
    assert y[0, 3:, 7].isnan().all() and int(y.isnan().sum()) == 3
    token.qkv[1] = torch.nan
    assert token.attend(20)[0][1].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, inner", [(1, 14336), (3, 100), (16, 7)])
def test_gates(device, dtype, rows, inner):
    x = torch.randn(rows, 2 * inner, device=device, dtype=dtype) * 4
    gate, up = x.chunk(2, -1)
    assert_rounded_alike(nvfp4.gated(x, Activation.SILU), torch.nn.functional.silu(gate) * up)
    assert_rounded_alike(nvfp4.gated(x, Activation.GELU_TANH), torch.nn.functional.gelu(gate, approximate="tanh") * up)
    assert_rounded_alike(nvfp4.gated(x, Activation.GELU), torch.nn.functional.gelu(gate) * up)
    experts = types.SimpleNamespace(limit=7.0, alpha=1.702)
    expected = gpt_oss.GptOssExperts._apply_gate(experts, torch.stack([gate, up], -1).flatten(-2))
    assert_rounded_alike(nvfp4.gated(x, Activation.CLAMPED_GLU), expected, 2)
    alternating = torch.stack([gate, up], -1).flatten(-2)
    assert_rounded_alike(nvfp4.gated(alternating, Activation.CLAMPED_GLU, interleaved=True), expected, 2)
    with pytest.raises((ValueError, RuntimeError), match="activation must be"):
        nvfp4.gated(x, 9)


def weights(device, columns, *rows, per_row=False):
    parts = []
    for n in rows:
        t = NVFP4Tensor.to_nvfp4(torch.randn(n, columns, device=device, dtype=torch.bfloat16))
        factor = t.per_tensor_scale * torch.linspace(0.5, 1.5, n, device=device) if per_row else t.per_tensor_scale
        parts.append((t.qdata, t.scale, factor))
    return [list(each) for each in zip(*parts, strict=True)]


def sizes(device, *cases):
    """Return the cases (columns, ...) of a device: plain torch, which serves a CPU, has one path for all sizes."""
    return [case for case in cases if device == "cuda" or case[0] <= 1100]


@pytest.mark.parametrize("batch", [0, 1, 8, 16, 17, 40, 64, 100, 128, 200, 512, 2100])
@pytest.mark.parametrize("dtype, per_row", [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, True)])
def test_linears_are_products(device, batch, dtype, per_row):
    """Bit for bit, with biases and without; with more than 8 rows another kernel may add in another order."""
    for columns, rows in sizes(
        device, (256, (128,)), (256, (256, 128, 128)), (1024, (512, 512)), (512, (256, 64, 64)), (200, (48, 100)),
        (64, (256, 512, 256)), (208, (512, 256)), (64, (100, 48, 4)), (4096, (4096, 1024, 1024)), (4096, (2048, 2048)),
    ):  # fmt: skip
        x = torch.randn(batch, columns, device=device, dtype=dtype)
        parts = weights(device, columns, *rows, per_row=per_row)
        biases = [torch.randn(n, device=device, dtype=dtype) for n in rows]
        biases[-1] = biases[-1][:0]
        for given in ([], biases):
            expected = [
                nvfp4.matmul(x, None, *each, given[i] if given and given[i].numel() else None, columns, False, x.dtype)
                for i, each in enumerate(zip(*parts, strict=True))
            ]
            y, expected = nvfp4.linears(x, *parts, given), torch.cat(expected, -1)
            if batch <= 8:
                assert torch.equal(y, expected)
            most = float(expected.abs().max()) if batch else 0.0
            torch.testing.assert_close(y, expected, rtol=2**-7, atol=2**-12 * most)


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("batch", [1, 5, 16])
def test_gated_products_round_as_single_ones(device, activation, batch):
    for columns, rows in sizes(device, (256, 128), (2560, 384), (4096, 14336), (14336, 1024), (200, 48)):
        x = torch.randn(batch, columns, device=device, dtype=torch.bfloat16)
        parts, bias = weights(device, columns, rows, rows), torch.randn(rows, device=device, dtype=torch.bfloat16)
        for biases in ([], [bias, bias[:0]]):
            y, total = nvfp4.norm_linears(x, None, None, 0.0, 0.0, True, 1.0, None, *parts, biases, activation)
            assert torch.equal(y, nvfp4.gated(nvfp4.linears(x, *parts, biases), activation))
            assert total.numel() == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", NORMS)
@pytest.mark.parametrize("batch", [1, 2, 3, 5, 16])
def test_a_norm_before_products(device, dtype, family, batch):
    """Up to the order in which squares are added."""
    how = (1e-5, NORMS[family][1].get("offset", 0.0), NORMS[family][1].get("round_before_weight", True))
    for columns, rows, activation in sizes(
        device, (256, (256, 128, 128), -1), (1024, (384,), -1), (4096, (1024, 1024), 0), (2560, (384, 384), 1),
        (8192, (256,), -1), (200, (48, 48), 0), (1088, (128, 128), -1),
    ):  # fmt: skip
        x, residual = torch.randn(2, batch, columns, device=device, dtype=dtype)
        norm, parts = torch.rand(columns, device=device, dtype=dtype), weights(device, columns, *rows)
        for added, multiplier in ((residual, 1.0), (None, 1.0), (residual, 0.22)):
            y, total = nvfp4.norm_linears(x, added, norm, *how, multiplier, None, *parts, [], activation)
            normed, expected_total = nvfp4.rms_norm(x, added, norm, *how, multiplier)
            assert torch.equal(total, expected_total)
            expected = nvfp4.linears(normed, *parts, [])
            expected = expected if activation < 0 else nvfp4.gated(expected, activation)
            torch.testing.assert_close(y, expected, rtol=0.02, atol=0.01 * float(expected.abs().max()))
        y, total = nvfp4.norm_linears(x, residual, norm, *how, 1.0, norm, *parts, [], activation)
        assert torch.equal(total, nvfp4.rms_norm(x, residual, None, *how, 1.0, norm)[1])


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 8, 16])
def test_a_step_in_a_graph_overlaps_its_kernels(batch):
    """Layers of a Llama, all of whose kernels begin early: the bits of one operator at a time, at each position."""
    hidden, inner, heads, kv_heads, dim, layers = 1024, 3584, 8, 2, 128, 6
    size = (batch, kv_heads, 32, dim)
    caches = [torch.zeros(2, *size, device="cuda", dtype=torch.bfloat16) for _ in range(layers)]
    norms = torch.rand(2, layers, hidden, device="cuda").bfloat16()
    attention = [heads * dim, kv_heads * dim, kv_heads * dim]
    parts = [
        (weights("cuda", hidden, *attention), weights("cuda", heads * dim, hidden),
         weights("cuda", hidden, inner, inner), weights("cuda", inner, hidden)) for _ in range(layers)
    ]  # fmt: skip
    angles = torch.randn(32, dim, device="cuda")
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    x, position = torch.randn(batch, hidden, device="cuda").bfloat16(), torch.zeros(1, device="cuda", dtype=torch.int64)
    how = (1e-5, 0.0, True, 1.0, None)

    def step(wait):
        y, total = x, torch.zeros_like(x)
        turn = cos[position], sin[position]
        for (qkv, out, gate_up, down), (keys, values), first, second in zip(parts, caches, *norms, strict=True):
            y, total = nvfp4.norm_linears(y, total, first, *how, *qkv, [])
            wait()
            args = (None, None, 0.0, 0.0, True, *turn, keys, values, position, heads, dim**-0.5)
            y = nvfp4.linears(nvfp4.attend_one(y, *args), *out, [])
            wait()
            y, total = nvfp4.norm_linears(y, total, second, *how, *gate_up, [], activation=0)
            wait()
            y = nvfp4.linears(y, *down, [])
            wait()
        return y

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(lambda: None)
    torch.cuda.current_stream().wait_stream(stream)
    graph, replayed = captured(lambda: step(lambda: None))
    expected = []
    for at in range(12):
        position.fill_(at)
        expected.append((step(torch.cuda.synchronize), [cache.clone() for cache in caches]))
    for cache in caches:
        cache.zero_()
    for at, (y, after) in enumerate(expected):
        position.fill_(at)
        graph.replay()
        assert torch.isfinite(y).all() and torch.equal(replayed, y)
        assert all(torch.equal(a, b) for a, b in zip(caches, after, strict=True))
