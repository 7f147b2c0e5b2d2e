"""nvfp4.decode_step: what the CPU library decodes in one parallel section, beside the same in torch's operators."""

import dataclasses
import itertools

import pytest
import torch
from helpers.instruction_sets import each_instruction_set

from nvfp4_tensor import NVFP4Tensor, quantize_experts
from nvfp4_tensor.ops import native
from nvfp4_tensor.ops.composite.decode_step import KINDS, PARTS, NormStyle, Routing
from nvfp4_tensor.ops.composite.step import Activation
from nvfp4_tensor.ops.schemas import plain

LENGTH = 48
NUMBERS = {"eps": 1e-5, "scaling": None, "softcap": 0.0, "residual": 1.0, "alpha": 1.702, "limit": 2.0}


def instruction_sets():
    """Each of float32, then the machine's best, which may have bfloat16 products."""
    yield from each_instruction_set()
    yield ""


@dataclasses.dataclass
class Step:
    """A random model, its caches, and one token of each text."""

    x: torch.Tensor
    weights: list[torch.Tensor]
    kinds: torch.Tensor
    numbers: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    rotated: int
    wide: bool = False
    starts: torch.Tensor | None = None
    places: torch.Tensor | None = None

    def run(self, function, position):
        """(hidden state, caches behind it)."""
        keys, values = ([t.clone() for t in each] for each in (self.keys, self.values))
        at = torch.tensor([position]) if self.places is None else self.places
        bases = (10000.0, 500.0)
        angles = [at[:, None] * base ** (-torch.arange(0, self.rotated, 2) / self.rotated) for base in bases]
        dtype = torch.float32 if self.wide else torch.bfloat16
        cos, sin = ([f(torch.cat([a, a], -1)).to(dtype) for a in angles] for f in (torch.cos, torch.sin))
        y = function(self.x, self.weights, self.kinds, self.numbers, keys, values, cos, sin, position, self.starts)
        return y, keys, values

    def alone(self, row):
        """The same with one text."""
        one = slice(row, row + 1)
        keys, values = ([t[one].clone() for t in each] for each in (self.keys, self.values))
        starts, places = (None if t is None else t[one] for t in (self.starts, self.places))
        return dataclasses.replace(self, x=self.x[one], keys=keys, values=values, starts=starts, places=places)


def weight(n, k, per_row=False):
    t = NVFP4Tensor.to_nvfp4(torch.randn(n, k, dtype=torch.bfloat16) * k**-0.5)
    factor = t.per_tensor_scale * torch.linspace(0.5, 1.5, n) if per_row else t.per_tensor_scale
    return [t.qdata, t.scale, factor]


def experts(count, n, k):
    t = quantize_experts(torch.randn(count, n, k, dtype=torch.bfloat16) * k**-0.5)
    return [t.qdata, t.scale, t.per_tensor_scale]


def random_step(
    hidden=96, inner=160, heads=6, kv_heads=2, dim=32, layers=2, per_row=False, parts=(), without=(), fused=False,
    biases=False, rotated=None, wide=False, span=False, length=LENGTH, experts_of=0, wide_norms=False, numbers=(),
    texts=1, starts=None, places=None, **kinds,
):  # fmt: skip
    """A Llama, but for what is named: further parts of a block, or parts it does not have."""
    queries, cached = heads * dim, kv_heads * dim
    norm_names = {"norm_before_attention", "norm_before_feed_forward"}
    linears = {"q": (queries, hidden), "k": (cached, hidden), "v": (cached, hidden), "o": (hidden, queries),
               "gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}  # fmt: skip
    if fused:
        linears["q"], linears["gate"] = (queries + 2 * cached, hidden), (2 * inner, hidden)
        linears = {name: shape for name, shape in linears.items() if name not in ("k", "v", "up")}
    if experts_of:
        linears["gate"] = (2 * inner, hidden)
        linears.pop("up", None)

    def norm(size=hidden):
        return torch.rand(size).to(torch.float32 if wide_norms else torch.bfloat16) + 0.5

    def make(name):
        if name in linears:
            shape = linears[name]
            return experts(experts_of, *shape) if experts_of and name in ("gate", "down") else weight(*shape, per_row)
        if name.endswith("_bias"):
            size = experts_of if name == "router_bias" else linears[name.removesuffix("_bias")][0]
            many = experts_of and name in ("gate_bias", "down_bias")
            return [torch.randn(*([experts_of] if many else []), size).bfloat16()]
        sizes = {"q_norm": queries if span else dim, "k_norm": cached if span else dim}
        if name == "router":
            return [torch.randn(experts_of, hidden).bfloat16() * hidden**-0.5]
        return [torch.randn(heads).bfloat16()] if name == "sinks" else [norm(sizes.get(name, hidden))]

    names = (norm_names | set(linears) | set(parts) | ({"router"} if experts_of else set())) - set(without)
    if biases:
        names |= {f"{name}_bias" for name in names if name in linears or name == "router"}
    tensors, rows = [], []
    for i in range(layers):
        for name in PARTS:
            tensors += make(name) if name in names else []
        own = {name: value[i % len(value)] if isinstance(value, tuple) else value for name, value in kinds.items()}
        bits = sum(1 << at for at, name in enumerate(PARTS) if name in names)
        rows.append({"parts": bits, "heads": heads, "kv_heads": kv_heads, "dim": dim} | own)
    last = {"parts": 1, "norm": kinds.get("norm", 0)}
    table = torch.tensor([[int(row.get(name, 0)) for name in KINDS] for row in [*rows, last]])
    floats = NUMBERS | {"scaling": dim**-0.5} | dict(numbers)
    lengths = length if isinstance(length, tuple) else (length,)
    caches = [
        [torch.randn(texts, kv_heads, lengths[i % len(lengths)], dim).bfloat16() for i in range(layers)]
        for _ in range(2)
    ]
    return Step(
        torch.randn(texts, hidden).bfloat16(), [*tensors, norm()], table,
        torch.tensor([list(floats.values())] * (layers + 1), dtype=torch.float64), *caches, rotated or dim, wide,
        starts, places,
    )  # fmt: skip


def assert_same(step, position, rtol=0.02, ties=0):
    """Within what sums in another order change: a bfloat16 that falls to the other side now and then.

    ties: texts that may go to other experts, as two scores differ by a rounding.
    """
    expected, *expected_caches = step.run(plain.decode_step, position)
    assert torch.isfinite(expected).all()
    for _ in instruction_sets():
        y, *caches = step.run(torch.ops.nvfp4.decode_step, position)
        kept = (y - expected).abs().amax(-1).argsort()[: len(y) - ties]
        torch.testing.assert_close(y[kept], expected[kept], rtol=rtol, atol=rtol * float(expected.abs().max()))
        for ours, others in zip(itertools.chain(*caches), itertools.chain(*expected_caches), strict=True):
            atol = rtol * float(others.abs().max())
            torch.testing.assert_close(ours[kept], others[kept], rtol=rtol, atol=atol)
            behind = slice(position + 1, None)
            assert torch.equal(ours[:, :, behind], others[:, :, behind])


GEMMA_NORMS = ("norm_after_attention", "norm_after_feed_forward")
GEMMA = {"parts": GEMMA_NORMS, "norm": NormStyle.PLUS_ONE | NormStyle.ROUND_ONCE, "activation": Activation.GELU_TANH}
FAMILIES = {
    "llama": {},
    "qwen2": {"biases": True},
    "qwen3": {"parts": ("q_norm", "k_norm")},
    "gemma2": {**GEMMA, "numbers": {"softcap": 5.0}, "window": (8, 0), "length": (8, LENGTH)},
    "gemma3": {**GEMMA, "parts": (*GEMMA_NORMS, "q_norm", "k_norm"), "rotary": (0, 1), "dim": 48},
    "phi3": {"fused": True, "rotated": 24},
    "phi3 with biases": {"fused": True, "biases": True},
    "smollm3": {"rotary": (0, -1)},
    "olmo2": {"parts": ("q_norm", "k_norm", *GEMMA_NORMS), "span": True, "wide": True, "norm": NormStyle.ROUND_ONCE,
              "without": ("norm_before_attention", "norm_before_feed_forward")},
    "gelu": {"activation": Activation.GELU},
    "granite": {"numbers": {"residual": 0.22, "scaling": 0.01}},
    "a window in a long cache": {"window": 8},
    "sinks": {"parts": ("sinks",), "norm": NormStyle.ROUND_ONCE, "wide_norms": True},
    "odd multiples of 16": {"hidden": 80, "dim": 16, "inner": 48},
}  # fmt: skip


MIXTURE = {"hidden": 128, "inner": 64, "experts_of": 6, "chosen": 2}
MIXTURES = {
    "mixtral": {**MIXTURE, "routing": Routing.NORMALIZED},
    "qwen3": {**MIXTURE, "routing": Routing.NORMALIZED | Routing.ROUNDED, "chosen": 3, "parts": ("q_norm", "k_norm")},
    "not normalized": {**MIXTURE, "routing": Routing.ROUNDED, "chosen": 1},
    "gpt-oss": {**MIXTURE, "routing": Routing.OF_CHOSEN | Routing.ROUNDED, "biases": True, "parts": ("sinks",),
                "activation": Activation.CLAMPED_GLU, "inner": 192, "chosen": 4},
    "norms after": {**MIXTURE, "routing": Routing.NORMALIZED, "parts": GEMMA_NORMS, "numbers": {"residual": 0.5}},
}  # fmt: skip


def test_sizes():
    for sizes in (
        {"hidden": 576, "inner": 1536, "heads": 9, "kv_heads": 3, "dim": 64},
        {"hidden": 64, "inner": 48, "heads": 4, "kv_heads": 4, "dim": 128},
        {"hidden": 32, "inner": 16, "heads": 1, "kv_heads": 1, "layers": 1},
        {"per_row": True},
    ):
        assert_same(random_step(**sizes), 20)


def batch(texts, position, seed, **family):
    """A step of texts that start anywhere up to the new token, each with its own rotation."""
    starts = torch.randint(position + 1, (texts,), generator=torch.Generator().manual_seed(seed))
    starts[0] = 0
    return random_step(**family, texts=texts, starts=starts, places=position - starts)


families = pytest.mark.parametrize("family", [*FAMILIES.values(), *MIXTURES.values()], ids=[*FAMILIES, *MIXTURES])


@pytest.mark.parametrize("texts", [1, 9, 33])
@families
def test_decodes_as_torch_does(family, texts):
    """Windows, full caches that move, sinks, caps and mixtures; several texts, left-padded."""
    for position in (3, 20) if family else (0, 1, 15, 16, 20, 47):
        step = batch(texts, position, texts, **family) if texts > 1 else random_step(**family)
        assert_same(step, position, ties=texts // 8 if "experts_of" in family else 0)


@families
def test_a_text_has_the_same_bits_alone(family):
    """Up to the rows of x that every instruction set's few rows have, but AMX's."""
    step = batch(8, 20, 0, **family)
    for instructions in instruction_sets():
        if instructions != "" or "amx" not in native.instruction_set():
            y, *caches = step.run(torch.ops.nvfp4.decode_step, 20)
            for row in (0, 3, 7):
                z, *others = step.alone(row).run(torch.ops.nvfp4.decode_step, 20)
                assert torch.equal(y[row], z[0])
                for ours, theirs in zip(itertools.chain(*caches), itertools.chain(*others), strict=True):
                    assert torch.equal(ours[row], theirs[0])


def test_padding_is_not_read():
    """Neither NaN nor what another start would see; and a text of its last token alone."""
    step = batch(4, 20, 0, window=(0, 8), length=(LENGTH, 8))
    step.starts[:] = torch.tensor([0, 7, 14, 20])
    for run in (torch.ops.nvfp4.decode_step, plain.decode_step):
        expected, *_ = step.run(run, 20)
        for cache in (*step.keys, *step.values):
            # Of the second layer, slot 0 has position 12, and moves out.
            first = 0 if cache.shape[2] == LENGTH else 12
            for row, start in enumerate(step.starts.tolist()):
                cache[row, :, : max(start - first, 0)] = float("nan")
        assert torch.equal(step.run(run, 20)[0], expected)
        for row, start in enumerate((0, 6, 14, 20)):
            step.starts[row] = start
        assert not torch.equal(step.run(run, 20)[0][1], expected[1])
        step.starts[1] = 7


@pytest.mark.parametrize("family", [
    {}, *(each | {"texts": n} for n in (1, 5) for each in (FAMILIES["gemma2"], FAMILIES["olmo2"], MIXTURES["gpt-oss"])),
], ids=str)  # fmt: skip
def test_threads_change_no_bit(family):
    step, results = random_step(**family), []
    for threads in (1, 2, 3, 8):
        torch.set_num_threads(threads)
        results.append(step.run(torch.ops.nvfp4.decode_step, 9))
    for y, keys, values in results[1:]:
        for a, b in zip([y, *keys, *values], [results[0][0], *results[0][1], *results[0][2]], strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("full", [False, True], ids=["", "full"])
def test_numbers_beyond_bfloat16_products(full):
    """x above 2^100 overflows before the block scales, below 2^-100 it is flushed: other kernels take over.

    A full cache moves once, however often the token is decoded.
    """
    for scale in (2.0**105, 2.0**-105):
        step = random_step(layers=2, **({"window": 3, "length": 3} if full else {}))
        for norm in (13, 36):
            step.weights[norm] = step.weights[norm] * scale
            for at in (norm + 3, norm + 6):
                step.weights[at] = step.weights[at] / scale
        assert_same(step, 3)


def test_nan_is_kept():
    step = random_step()
    step.x[0, 5] = float("nan")
    for _ in instruction_sets():
        assert step.run(torch.ops.nvfp4.decode_step, 3)[0].isnan().all()


def test_a_full_cache_moves_as_transformers_moves_it():
    cache_utils = pytest.importorskip("transformers.cache_utils")
    step = random_step(window=8, length=8)
    before = [each.clone() for each in step.keys]
    _, keys, _ = step.run(torch.ops.nvfp4.decode_step, 30)
    for ours, old in zip(keys, before, strict=True):
        layer = cache_utils.StaticSlidingWindowLayer(max_cache_len=40, sliding_window=8)
        layer.update(old, old)
        layer.update(ours[:, :, -1:], ours[:, :, -1:])
        assert torch.equal(layer.keys, ours)


@pytest.mark.parametrize("change, message", [
    (lambda s: s.weights.pop(), "too few tensors"),
    (lambda s: s.weights.append(s.x), "must end with the last norm"),
    (lambda s: s.keys.pop(), "one a block"),
    (lambda s: s.weights.__setitem__(0, s.weights[0].half()), "a norm must be 96 contiguous bfloat16"),
    (lambda s: s.weights.__setitem__(4, s.weights[4][:-1]), r"k must be a contiguous weight of \(64, 96\)"),
    (lambda s: s.values.__setitem__(1, s.values[1][:, :, ::2]), "all alike"),
    (lambda s: setattr(s, "x", s.x.float()), "x must be 96"),
    (lambda s: setattr(s, "x", s.x.expand(2, -1).contiguous()), r"\(2, 2, length, 32\)"),
    (lambda s: setattr(s, "places", torch.arange(2)), "cos and sin must be"),
    (lambda s: setattr(s, "starts", torch.zeros(2, dtype=torch.int64)), "starts must be 1 contiguous int64"),
    (lambda s: setattr(s, "starts", torch.tensor([4])), "a text must start at 0 to 3"),
    (lambda s: setattr(s, "kinds", s.kinds[:, :-1]), "kinds and numbers must be"),
    (lambda s: setattr(s, "rotated", 64), "a rotation of 64 elements of a head of 32"),
    (lambda s: s.kinds[0].__setitem__(5, 2), "rotation 2 of 2"),
    (lambda s: s.kinds[0].__setitem__(7, 4), "an activation is"),
    (lambda s: s.kinds[0].__setitem__(0, 1), "a block without qkv"),
], ids=lambda v: v if isinstance(v, str) else "")  # fmt: skip
def test_what_is_refused(change, message):
    if not native.library("cpu").loaded:
        pytest.skip("plain torch serves")
    step = random_step()
    change(step)
    with pytest.raises(RuntimeError, match=message):
        step.run(torch.ops.nvfp4.decode_step, 3)


@pytest.mark.parametrize("window", [0, LENGTH - 1])
def test_a_position_outside_of_the_cache(window):
    for run in (torch.ops.nvfp4.decode_step, plain.decode_step):
        with pytest.raises((RuntimeError, ValueError), match=f"outside of a cache of {LENGTH}"):
            random_step(window=window).run(run, LENGTH)


@pytest.mark.parametrize("threads", [1, 5])
def test_a_dense_row(threads):
    torch.set_num_threads(threads)
    for texts, rows, columns in ((1, 1, 32), (1, 100, 96), (1, 1000, 576), (3, 100, 96), (20, 50, 64)):
        x, w = torch.randn(texts, columns).bfloat16(), torch.randn(rows, columns).bfloat16()
        expected = (x.double() @ w.double().mT).bfloat16()
        assert torch.equal(plain.linear_row(x, w), (x.float() @ w.float().mT).bfloat16())
        for _ in instruction_sets():
            y = torch.ops.nvfp4.linear_row(x, w)
            torch.testing.assert_close(y, expected, rtol=2**-8, atol=1e-4)
            assert torch.equal(y[-1:], torch.ops.nvfp4.linear_row(x[-1:].contiguous(), w))
