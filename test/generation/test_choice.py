"""Test the choice of tokens: what is left by top-k and top-p, frequencies, and random numbers by seed."""

import pytest
import torch

pytest.importorskip("transformers")
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from nvfp4_tensor.generation.choice import PARTS, Chooser, Sampling, largest_of, uniforms


def test_random_numbers():
    """They do not depend on how many there are, differ by seed and row, and are uniform."""
    u = uniforms(3, 20000, range(4))
    assert torch.equal(u[:7], uniforms(3, 7, range(4))) and torch.equal(u[:, [2, 0]], uniforms(3, 20000, [2, 0]))
    assert torch.equal(u[100:107], uniforms(3, 7, range(4), first=100))
    assert not torch.equal(u[:7], uniforms(4, 7, range(4))) and uniforms(-(2**70) - 1, 2, range(2)).shape == (2, 2)
    assert u.min() >= 0 and u.max() < 1
    assert ((u.mean(0) - 0.5).abs() < 0.01).all() and ((u.std(0) * 12**0.5 - 1).abs() < 0.02).all()
    correlation = torch.corrcoef(torch.cat((u[1:], u[:-1]), 1).T) - torch.eye(8)
    assert correlation.abs().max() < 0.03
    # The hash is splitmix64, whose first numbers from seed 0 are published.
    first = uniforms(0, 1, range(1)).item()
    state = _splitmix(_splitmix(0) & (1 << 64) - 1)
    assert first == (state >> 16) / (1 << 48)


def _splitmix(x):
    mask = (1 << 64) - 1
    x = x + 0x9E3779B97F4A7C15 & mask
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    return x ^ x >> 31


@pytest.mark.parametrize("count", [PARTS * 50, PARTS * 50 + 1])
def test_the_largest_is_the_first(count, device):
    """Of equal ones, too, and a NaN is larger than all, as in torch.max."""
    generator = torch.Generator().manual_seed(count)
    logits = torch.randint(0, 8, (16, count), generator=generator).bfloat16().to(device)
    logits[3, 700] = logits[5, 0] = logits[5, -1] = float("nan")
    logits[7] = -float("inf")
    largest, tokens = largest_of(logits)
    for row, value, token in zip(logits.cpu(), largest.cpu(), tokens.cpu(), strict=True):
        same = row.isnan() if value.isnan() else row == value
        assert same[token] and (value.isnan() or not same[:token].any())
        assert value.isnan() == row.isnan().any() and (value.isnan() or value == row.max())
    assert largest.isnan().nonzero().flatten().tolist() == [3, 5]
    chooser = Chooser(Sampling(), 16, 1, torch.device(device))
    assert torch.equal(chooser(logits.to(device)), tokens.to(device))
    assert torch.equal(chooser.chosen, torch.where(largest.isnan(), -1, tokens).to(device))


@pytest.mark.parametrize("temperature, options", [
    (0.7, {}), (2.0, {"top_k": 5}), (0.7, {"top_p": 0.7}), (2.0, {"top_k": 20, "top_p": 0.8}), (0.7, {"top_p": 1.0}),
    (2.0, {"top_k": 1000}), (0.7, {"top_p": 1e-6}),
], ids=str)  # fmt: skip
def test_frequencies(temperature, options, device):
    """Tokens are drawn as often as transformers' processors would have them: chi-squared over 20 000 draws."""
    scores = torch.randn(1, 40, generator=torch.Generator().manual_seed(2)) * 2
    expected = TemperatureLogitsWarper(temperature)(None, scores)
    if "top_k" in options:
        expected = TopKLogitsWarper(min(options["top_k"], 40))(None, expected)
    if "top_p" in options:
        expected = TopPLogitsWarper(options["top_p"])(None, expected)
    expected = expected.softmax(-1)[0]
    chooser = Chooser(Sampling(temperature, seed=1, **options), 200, 100, torch.device(device))
    logits = scores.expand(200, -1).to(device)
    drawn = torch.stack([chooser(logits) for _ in range(100)]).flatten().cpu()
    assert torch.equal(drawn[-200:], chooser.chosen.cpu())
    counts = torch.bincount(drawn, minlength=40)
    assert (counts[expected == 0] == 0).all()
    likely = expected * 20000 > 5
    squares = ((counts - expected * 20000) ** 2 / (expected * 20000))[likely].sum()
    degrees = int(likely.sum()) - 1
    assert squares < degrees + 5 * (2 * degrees) ** 0.5 + 1


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.9}], ids=str)
def test_infinite_logits_and_temperatures_near_zero(options, device):
    """Scores divided by it overflow: of an infinite difference to the largest one comes no NaN, and not token 0."""
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(3)).to(device)
    logits[0, 7] = torch.inf
    logits[1] = -torch.inf
    logits[1, 9] = 0.0
    for temperature in (1e300, 0.5, 1e-3, 1e-30, 1e-38, 1e-45, 1e-60):
        rows = slice(0, 2) if temperature >= 0.5 else slice(0, 5)
        chooser = Chooser(Sampling(temperature, seed=3, **options), 5, 4, torch.device(device))
        for _ in range(4):
            assert torch.equal(chooser(logits)[rows], logits.argmax(-1)[rows]) and (chooser.chosen >= 0).all()


@pytest.mark.parametrize("options, message", [
    ({"temperature": -1.0}, "temperature must be 0"), ({"temperature": float("inf")}, "temperature must be 0"),
    ({"temperature": float("nan")}, "temperature must be 0"), ({"temperature": 1.0, "top_k": 0}, "top_k must be"),
    ({"temperature": 1.0, "top_k": 1.5}, "top_k must be"),
    ({"temperature": 1.0, "top_k": True}, "top_k must be"), ({"temperature": 1.0, "top_p": 0.0}, "top_p must be"),
    ({"temperature": 1.0, "top_p": 1.1}, "top_p must be"), ({"top_k": 3}, "set temperature"),
    ({"seed": 0.5}, "seed must be an int"), ({"seed": [1, 0.5]}, "seed must be an int"),
    ({"seed": torch.tensor([1])}, "seed must be an int"),
])  # fmt: skip
def test_invalid_sampling_raises(options, message):
    with pytest.raises(TypeError if "seed" in options else ValueError, match=message):
        Sampling(**options)


def test_a_seed_for_each_text(device):
    """Its tokens are those of the only text of that seed, also after others have ended."""
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(3)).to(device)
    alone = Chooser(Sampling(1.0, seed=7), 1, 4, torch.device(device))
    expected = [alone(logits).item() for _ in range(4)]
    chooser = Chooser(Sampling(1.0, seed=[5, 7, 6]), 3, 4, torch.device(device))
    assert [chooser(logits.expand(3, -1))[1].item() for _ in range(4)] == expected
    chooser.load(Sampling(1.0, seed=[5, 6, 6, 7]), (1, 3, 0), 2)
    assert [chooser(logits.expand(3, -1))[1].item() for _ in range(2)] == expected[2:]
