"""GPTQ of mixtures of experts and of transformers models."""

import copy

import pytest
import torch
from quantization.accuracy.gptq.test_run import WIDTH, assert_same_codes, batches, error, weights
from torch import nn
from torch.nn.functional import linear

from nvfp4_tensor import NVFP4Tensor
from nvfp4_tensor.quantization import GPTQConfig, gptq

pytestmark = pytest.mark.slow

# --- experts ---------------------------------------------------------------------------------------------------------


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
    dense = nn.ModuleDict({"layers": nn.ModuleList(Experts(grouped) for _ in range(2))}).bfloat16().eval()
    dense.forward = lambda x: dense["layers"][1](dense["layers"][0](x))
    data = batches(dtype=torch.bfloat16)
    own, nearest = copy.deepcopy(dense), copy.deepcopy(dense)
    for m in (own, nearest):
        m.forward = lambda x, m=m: m["layers"][1](m["layers"][0](x))
    chosen = lambda module, name: isinstance(module, Experts)  # noqa: E731
    gptq(nearest, data, GPTQConfig(damping=1e9), filter_fn=chosen, progress=False)
    gptq(own, data, filter_fn=chosen, progress=False)
    for layer in own["layers"]:
        assert isinstance(layer.up, NVFP4Tensor) and layer.up.per_tensor_scale.shape == (4, 1)
        assert type(layer.router.weight.data) is torch.Tensor
    # the expert that nobody asked is rounded to nearest
    for part in ("up", "down"):
        a, b = (getattr(m["layers"][0], part)[3].dequantize() for m in (own, nearest))
        assert torch.equal(a, b)
    assert error(own, dense, data) < 0.7 * error(nearest, dense, data)


# --- models of transformers ------------------------------------------------------------------------------------------

TINY = dict(
    vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1,
)  # fmt: skip


def of_transformers(kind):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY, tie_word_embeddings=True)).eval()
    config = transformers.MixtralConfig(**TINY, num_local_experts=4, num_experts_per_tok=2)
    config._experts_implementation = kind
    return transformers.MixtralForCausalLM(config).eval()


def _in_a_layer(module, name):
    return isinstance(module, nn.Linear) and any(part.isdigit() for part in name.split("."))


@pytest.mark.parametrize("kind", ["gpt_neox", "bloom", "falcon"])
def test_a_cache_of_any_name_is_left_out(kind):
    """Each layer runs several times; with a cache it would also attend to the tokens of its previous run."""
    transformers = pytest.importorskip("transformers")
    sizes = dict(vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96)
    made = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(kind, **sizes, use_cache=use_cache)
        m = transformers.AutoModelForCausalLM.from_config(config).eval()
        data = [{"input_ids": torch.randint(64, (2, 30), generator=torch.Generator().manual_seed(1))}]
        gptq(m, data, filter_fn=_in_a_layer, progress=False)
        made.append(m)
    assert sum(isinstance(w, NVFP4Tensor) for w in weights(made[0]).values()) == 8
    assert_same_codes(*made)


@pytest.mark.parametrize("kind", ["llama", "eager", "grouped_mm"])
def test_a_model_of_transformers(kind):
    dense = of_transformers(kind)
    data = [{"input_ids": torch.randint(64, (2, 60), generator=torch.Generator().manual_seed(i))} for i in range(3)]

    def chosen(module, name):
        experts = any(p.dim() == 3 for p in module._parameters.values() if p is not None)
        return experts or (isinstance(module, nn.Linear) and not name.endswith(("lm_head", "gate")))

    own, rough = copy.deepcopy(dense), copy.deepcopy(dense)
    gptq(own, data, filter_fn=chosen, progress=False)
    gptq(rough, data, GPTQConfig(damping=1e9), filter_fn=chosen, progress=False)  # no feedback is left
    quantized = [name for name, p in own.named_parameters() if isinstance(p.data, NVFP4Tensor)]
    assert len(quantized) == 2 * (7 if kind == "llama" else 6)
    with torch.no_grad():
        errors = [
            sum((m(**x).logits - dense(**x).logits).square().sum().item() for x in data[:2]) for m in (own, rough)
        ]
    assert errors[0] < errors[1]
