"""GPTQ of mixtures of experts and of transformers models."""

import pytest
import torch
from quantization.accuracy.gptq.test_run import WIDTH, Chain, assert_same_codes, batches, error, quantized, weights
from torch import nn
from torch.nn.functional import linear

from nvfp4_tensor import NVFP4Tensor
from nvfp4_tensor.quantization import GPTQConfig

pytestmark = pytest.mark.slow


class Experts(nn.Module):
    """A mixture of experts with a loop over slices, or with torch's grouped product."""

    def __init__(self, grouped):
        super().__init__()
        self.grouped = grouped
        self.router = nn.Linear(WIDTH, 4)
        self.up = nn.Parameter(torch.randn(4, 96, WIDTH) / 8)
        self.down = nn.Parameter(torch.randn(4, WIDTH, 96) / 10)

    def forward(self, x):
        rows = x.flatten(0, -2)
        chosen = self.router(rows)[:, :3].argmax(-1)  # nobody asks the fourth
        order = chosen.argsort()
        y = torch.empty_like(rows)
        y[order] = (self._grouped if self.grouped else self._looped)(rows[order], chosen[order])
        return x + y.view_as(x)

    def _looped(self, rows, chosen):
        return torch.cat([linear(linear(rows[chosen == e], self.up[e]).tanh(), self.down[e]) for e in chosen.unique()])

    def _grouped(self, rows, chosen):
        offs = torch.searchsorted(chosen, torch.arange(1, 5)).int()
        inner = nn.functional.grouped_mm(rows.bfloat16(), self.up.mT, offs=offs).tanh()
        return nn.functional.grouped_mm(inner, self.down.mT, offs=offs).to(rows.dtype)


@pytest.mark.parametrize("grouped", [False, True])
def test_experts(grouped):
    torch.manual_seed(0)
    dense, data = Chain(Experts(grouped), Experts(grouped)).bfloat16().eval(), batches(dtype=torch.bfloat16)
    chosen = lambda module, name: isinstance(module, Experts)  # noqa: E731
    own, nearest = (quantized(dense, GPTQConfig(damping=damping), data, filter_fn=chosen) for damping in (0.01, 1e9))
    for layer in own.layers:
        assert isinstance(layer.up, NVFP4Tensor) and layer.up.per_tensor_scale.shape == (4, 1)
        assert type(layer.router.weight.data) is torch.Tensor
    for part in ("up", "down"):  # the expert that nobody asked is rounded to nearest
        assert torch.equal(*(getattr(m.layers[0], part)[3].dequantize() for m in (own, nearest)))
    assert error(own, dense, data) < 0.7 * error(nearest, dense, data)


class Transposed(Experts):
    """Experts stored as (E, K, N)."""

    def _grouped(self, rows, chosen):
        offs = torch.searchsorted(chosen, torch.arange(1, 5)).int()
        return nn.functional.grouped_mm(rows.bfloat16(), self.down, offs=offs).to(rows.dtype)[:, :WIDTH]


def test_experts_of_another_layout_are_refused():
    m = nn.Sequential(Transposed(True)).bfloat16().eval()
    with pytest.raises(ValueError, match=r"0.down has shape \(E, K, N\): GPTQ supports only experts \(E, N, K\)"):
        quantized(m, None, batches(dtype=torch.bfloat16), filter_fn=lambda module, name: isinstance(module, Experts))


@pytest.mark.parametrize("kind", ["gpt_neox", "bloom", "falcon"])
def test_a_cache_of_any_name_is_left_out(kind):
    """Each layer runs several times; with a cache it would also attend to the tokens of its previous run."""
    transformers = pytest.importorskip("transformers")
    sizes = dict(vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96)
    data = [{"input_ids": torch.randint(64, (2, 30), generator=torch.Generator().manual_seed(1))}]
    made = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(kind, **sizes, use_cache=use_cache)
        m = transformers.AutoModelForCausalLM.from_config(config).eval()
        made.append(quantized(m, None, data, filter_fn=lambda m, name: isinstance(m, nn.Linear) and "head" not in name))
    assert sum(isinstance(w, NVFP4Tensor) for w in weights(made[0]).values()) == 8
    assert_same_codes(*made)
