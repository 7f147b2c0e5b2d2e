"""The cost of quantizing each weight alone, and the choice of dense weights for a budget of bits."""

import copy
import random

import pytest
import torch
from torch import nn
from torchao.quantization import quantize_

from nvfp4_tensor import NVFP4Config, NVFP4Tensor, NVFP4WeightOnlyConfig
from nvfp4_tensor.quantization.accuracy.sensitivity import Part, Sensitivity, sensitivity


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 32)) for _ in range(3))
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def model():
    torch.manual_seed(0)
    return Model().bfloat16()


def batches():
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(3, 8, 32, generator=generator).bfloat16() for _ in range(2)]


@pytest.mark.parametrize("config", [NVFP4WeightOnlyConfig(), NVFP4Config(four_over_six=True)], ids=["w", "w and x"])
def test_a_loss_is_that_of_the_weight_alone(config):
    m = model()
    before = copy.deepcopy(m.state_dict())
    m.train()
    found = sensitivity(m, batches(), config, progress=False)
    assert m.training and all(torch.equal(before[name], value) for name, value in m.state_dict().items())
    assert all(type(each) is nn.Linear for each in m.modules() if isinstance(each, nn.Linear))
    assert len(found.parts) == 7
    for part in found.parts:
        own = copy.deepcopy(m).eval()
        quantize_(own, config, filter_fn=lambda module, name, part=part: f"{name}.weight" == part.name)
        with torch.no_grad():
            p, q = (torch.cat([each(x).float() for x in batches()]).log_softmax(-1) for each in (m, own))
        assert part.loss == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item(), rel=1e-3)
        assert part.loss > 0 and part.weights == (part.name,) and part.dense_bits == 16
        assert part.elements == own.get_parameter(part.name).numel()
        assert part.bits == own.get_parameter(part.name).bits_per_element


def test_what_feeds_more_costs_more_and_what_is_grouped_is_quantized_together():
    m = model()
    m.layers[1][2].weight.data *= 20
    found = sensitivity(m, batches(), progress=False)
    worst = max(found.parts[:-1], key=lambda part: part.loss)
    assert worst.name == "layers.1.2.weight"
    assert str(found).splitlines()[0].split()[:2] in ([p.name, f"{p.loss:.3e}"] for p in (worst, found.parts[-1]))
    layers = sensitivity(m, batches(), by_layer=True, progress=False)
    assert [part.name for part in layers.parts] == ["layers.0", "layers.1", "layers.2", "head.weight"]
    assert layers.parts[1].weights == ("layers.1.0.weight", "layers.1.2.weight")
    grouped = sensitivity(m, batches(), group_of=lambda name: "head" if "head" in name else "rest", progress=False)
    assert [part.name for part in grouped.parts] == ["rest", "head"]
    assert grouped.parts[0].weights == tuple(part.name for part in found.parts[:-1])
    assert grouped.parts[1].loss == found.parts[-1].loss
    assert grouped.parts[0].loss > 0.9 * worst.loss
    with pytest.raises(ValueError, match="give only one of them"):
        sensitivity(m, batches(), group_of=str, by_layer=True, progress=False)


def parts(*losses_and_elements):
    return Sensitivity(
        tuple(Part(f"p{i}", (f"p{i}",), loss, n, 16.0, 4.0) for i, (loss, n) in enumerate(losses_and_elements))
    )


def test_a_budget_goes_to_the_most_loss_a_bit():
    found = parts((2.0, 100), (3.0, 100), (2.5, 200))
    dense = {4.0: [], 6.999: [], 7.0: ["p1"], 9.9: ["p1"], 10.0: ["p1", "p0"], 16.0: ["p1", "p0", "p2"]}
    assert {bits: found.dense_within(bits) for bits in dense} == dense
    # what does not fit makes room for what does
    assert parts((9.0, 300), (0.1, 100)).dense_within(7.0) == ["p1"]
    with pytest.raises(ValueError, match=r"3 bits is below the 4\.000"):
        found.dense_within(3)


def test_any_budget_is_kept():
    draw = random.Random(0)
    for _ in range(200):
        parts = [
            Part(f"p{i}", (f"p{i}",), draw.choice([0.0, draw.random()]), draw.choice([1, draw.randint(1, 10**6)]),
                 draw.choice([16.0, 32.0]), draw.choice([4.5, 4.53, 5.0]))
            for i in range(draw.randint(1, 8))
        ]  # fmt: skip
        least = sum(part.bits * part.elements for part in parts) / sum(part.elements for part in parts)
        for more in (0.0, 0.001, draw.random(), 12 * draw.random()):
            budget = Sensitivity(tuple(parts), 7).within(least + more)
            assert budget.bits <= (least + more) * (1 + 1e-9) and budget.tokens == 7
            assert set(budget.left_dense) == set(Sensitivity(tuple(parts)).dense_within(least + more))
            used = sum((p.dense_bits if p.name in budget.left_dense else p.bits) * p.elements for p in parts)
            assert used == pytest.approx(budget.bits * sum(part.elements for part in parts))
            assert [part.loss for part in budget.costs] == sorted((part.loss for part in parts), reverse=True)


def test_the_filter_leaves_them_dense():
    m = model()

    def linears(module, name):
        return isinstance(module, nn.Linear) and name != "head"

    found = sensitivity(m, batches(), filter_fn=linears, progress=False)
    nvfp4 = sum(part.bits * part.elements for part in found.parts) / sum(part.elements for part in found.parts)
    take = found.filter_for_bit_budget(nvfp4 + 12 * 0.4, linears)
    quantize_(m, NVFP4WeightOnlyConfig(), filter_fn=take)
    dense = {f"{name}.weight" for name, module in m.named_modules() if type(module) is nn.Linear} - {"head.weight"}
    assert dense == set(found.dense_within(nvfp4 + 12 * 0.4)) and 0 < len(dense) < 6
    assert isinstance(m.layers[0][0].weight, NVFP4Tensor) or "layers.0.0.weight" in dense
    assert type(m.head) is nn.Linear


class Unused(nn.Module):
    def __init__(self, answer=lambda x: x):
        super().__init__()
        self.used, self.unused, self.answer = nn.Linear(32, 32), nn.Linear(32, 32), answer

    def forward(self, x):
        return self.answer(self.used(x))


def test_what_was_not_called_is_named():
    found = sensitivity(Unused(), [torch.randn(4, 32)], progress=False)
    assert {part.name: part.called for part in found.parts} == {"used.weight": True, "unused.weight": False}
    lines = {line.split()[0]: line for line in str(found).splitlines()}
    assert "not called" in lines["unused.weight"] and "nats" in lines["used.weight"]


@pytest.mark.parametrize(
    ("make", "arguments", "error", "message"),
    [
        (model, [[]], ValueError, "at least one batch"),
        (Unused, [{"x": torch.ones(4, 32)}], TypeError, r"not one dict: pass \[batch\]"),
        (Unused, [[torch.ones(0, 32)]], ValueError, "no tokens"),
        (Unused, [[torch.full((4, 32), torch.nan)]], ValueError, "unused.weight are NaN"),
        (model, [[1], NVFP4WeightOnlyConfig(scale_search="mse", weighted=True)], ValueError, "weighted needs inputs"),
        (model, [[1], NVFP4Config(step="convert")], ValueError, "without step"),
        *(
            (lambda answer=answer: Unused(answer), [[torch.ones(4, 32)]], TypeError, f"logits.*Unused returned {kind}")
            for kind, answer in {
                "tuple": lambda x: (x, x), "dict": lambda x: {"y": x}, "Tensor": lambda x: x.argmax(-1)
            }.items()
        ),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit(make, arguments, error, message):
    with pytest.raises(error, match=message):
        sensitivity(make(), *arguments, progress=False)
