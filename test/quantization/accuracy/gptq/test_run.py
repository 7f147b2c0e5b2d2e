"""GPTQ of models: the gain in accuracy, the chain of layers, resuming, experts and caches."""

import copy

import pytest
import torch
from helpers.bits import stored_bits
from torch import nn
from torchao.quantization import quantize_

from nvfp4_tensor import NVFP4Config, NVFP4Tensor, NVFP4WeightOnlyConfig, QuantizeSpec, checkpoints
from nvfp4_tensor.quantization import GPTQConfig, gptq
from nvfp4_tensor.quantization.accuracy.gptq.run import Finished

pytestmark = pytest.mark.slow

WIDTH = 64
SEARCH = NVFP4WeightOnlyConfig(weight_spec=QuantizeSpec(scale_search="mse"))


class Layer(nn.Module):
    """Two linears with one input, a third with another input, and a mask that only the model passes."""

    def __init__(self):
        super().__init__()
        self.up, self.gate = nn.Linear(WIDTH, 96), nn.Linear(WIDTH, 96)
        self.down = nn.Linear(96, WIDTH, bias=False)

    def forward(self, hidden_states, mask=None):
        inner = torch.tanh(self.gate(hidden_states)) * self.up(hidden_states)
        return hidden_states + mask * self.down(inner), "something else"


class Model(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.last = nn.Linear(WIDTH, 40)

    def forward(self, x):
        x = torch.nn.functional.layer_norm(self.mix(x), (WIDTH,))
        for layer in self.layers:
            x, _ = layer(hidden_states=x, mask=0.5)
        return self.last(x)


class Chain(nn.Module):
    """Layers one after the other."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return Model().to(dtype).eval()


def batches(count=4, dtype=torch.float32):
    """Inputs with correlated columns, which GPTQ needs."""
    generator = torch.Generator().manual_seed(1)
    mix = torch.randn(8, WIDTH, generator=generator)
    every = [
        (torch.randn(2, 40, 8, generator=generator), torch.randn(2, 40, WIDTH, generator=generator))
        for _ in range(count)
    ]
    return [(factors @ mix + 0.3 * noise).to(dtype) for factors, noise in every]


def quantized(m, config=None, data=None, **options):
    return gptq(copy.deepcopy(m), batches() if data is None else data, config, progress=False, **options)


def nearest(m, config=SEARCH):
    own = copy.deepcopy(m)
    quantize_(own, config)
    return own


def error(own, dense, data):
    with torch.no_grad():
        return sum((own(x).float() - dense(x).float()).square().sum() for x in data).item()


def weights(m):
    return {name: module.weight for name, module in m.named_modules() if isinstance(module, nn.Linear)}


def inside(module, name):
    return isinstance(module, nn.Linear) and "layers." in name


def assert_same_codes(a, b):
    a, b = ({name: w for name, w in weights(m).items() if isinstance(w, NVFP4Tensor)} for m in (a, b))
    assert a and a.keys() == b.keys()
    for name in a:
        assert torch.equal(stored_bits(a[name]), stored_bits(b[name])), name


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, torch.bfloat16),
        ({"act_order": False}, torch.float32),
        ({"sequential_within_layer": True}, torch.float32),
        ({"dense_target_weight": 0.5}, torch.bfloat16),
        ({"dense_target_weight": 1.0, "sequential_within_layer": True}, torch.float32),
        ({"base_config": NVFP4Config()}, torch.bfloat16),
    ],
    ids=str,
)
def test_it_beats_nearest(options, dtype):
    dense, config = model(dtype), GPTQConfig(**{"base_config": SEARCH} | options)
    own = quantized(dense, config, batches(dtype=dtype))
    for w in weights(own).values():
        assert isinstance(w, NVFP4Tensor) and w.dtype == dtype
        assert w.spec == config.weight and w.activation_spec == config.base_config.activation
    unseen = batches(7, dtype)[4:]
    least = 0.7 if w.activation_spec is None else 0.45
    assert error(own, dense, unseen) < least * error(nearest(dense, config.base_config), dense, unseen)


class Attention(nn.Module):
    """q, k and v with weights of other magnitudes; v has an input of its own, which comes after the output of q."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        for i, child in enumerate(self.children()):
            child.weight.data *= 2.0**i

    def forward(self, x):
        inner = self.q_proj(x) * self.k_proj(x).tanh()
        return x + self.o_proj(inner * self.v_proj(inner.tanh()))


class Experts(nn.Module):
    """A mixture whose experts are modules with linears; every row goes to one of them."""

    def __init__(self):
        super().__init__()
        names = ("gate_proj", "up_proj", "down_proj")
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH, bias=False) for name in names}) for _ in range(2)
        )
        for expert in self.experts:
            expert["up_proj"].weight.data *= 4

    def forward(self, x):
        rows = x.flatten(0, -2)
        chosen, y = self.gate(rows).argmax(-1), torch.zeros_like(rows)
        for i, expert in enumerate(self.experts):
            own = rows[chosen == i]
            y[chosen == i] = expert["down_proj"](expert["gate_proj"](own).tanh() * expert["up_proj"](own))
        return x + y.view_as(x)


JOINED = {Attention: ["{}q_proj", "{}k_proj", "{}v_proj"], Experts: ["{}experts.1.gate_proj", "{}experts.1.up_proj"]}


@pytest.mark.parametrize(
    ("layer", "options"),
    [
        (Attention, {}),
        (Attention, {"sequential_within_layer": True}),
        (Attention, {"dense_target_weight": 0.5}),
        (Attention, {"base_config": NVFP4Config()}),
        (Experts, {"sequential_within_layer": True, "base_config": NVFP4Config()}),
    ],
    ids=["attention", "sequential", "dense target", "w4a4", "experts"],
)
def test_linears_that_servers_join_share_a_scale(layer, options, tmp_path, monkeypatch):
    torch.manual_seed(0)
    dense, config = Chain(layer(), layer()), GPTQConfig(**options)
    shared = quantized(dense, config)
    monkeypatch.setattr("nvfp4_tensor.quantization.accuracy.gptq.run._joined", lambda model, targets: {})
    alone = quantized(dense, config)

    def scales(m, i):
        return [weights(m)[name.format(f"layers.{i}.")].per_tensor_scale for name in JOINED[layer]]

    assert (
        scales(shared, 0) == [max(scales(alone, 0))] * len(JOINED[layer]) and len(set(map(float, scales(alone, 0)))) > 1
    )
    assert len(set(map(float, scales(shared, 1)))) == 1
    others = [w.per_tensor_scale for name, w in weights(shared).items() if name.endswith(("o_proj", "down_proj"))]
    assert len(others) >= 2 and not set(map(float, others)) & set(map(float, scales(shared, 0)))
    checkpoints.save(shared, tmp_path / "q", mismatched_scales="refuse", weight_only=True, progress=False)


def test_a_model_without_layers_is_taken_as_a_whole():
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(WIDTH, 96), nn.ReLU(), nn.Linear(96, 40))
    unseen = batches(7)[4:]
    assert error(quantized(dense, SEARCH), dense, unseen) < 0.7 * error(nearest(dense), dense, unseen)
    whole = quantized(model(), layers=[])
    assert all(isinstance(w, NVFP4Tensor) for w in weights(whole).values())
    forced = quantized(dense, SEARCH, filter_fn=lambda module, name: name == "0")
    assert isinstance(forced[0].weight, NVFP4Tensor) and type(forced[2]) is nn.Linear


def test_a_run_goes_on_behind_what_it_finished(tmp_path, monkeypatch):
    m, save = model(), Finished.save

    def once(self, name, weights):
        save(self, name, weights)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Finished, "save", once)
        gptq(m, batches(), folder=tmp_path, progress=False)
    assert all(type(module) is nn.Linear for module in m.modules() if isinstance(module, nn.Linear))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["layers.0.pt", "settings.json"]
    written = (tmp_path / "layers.0.pt").stat().st_mtime_ns
    assert_same_codes(gptq(m, batches(), folder=tmp_path, progress=False), quantized(model()))
    assert (tmp_path / "layers.0.pt").stat().st_mtime_ns == written
    assert_same_codes(quantized(model(), folder=tmp_path), m)
    torch.save({}, tmp_path / "layers.1.pt")
    with pytest.raises(ValueError, match=r"layers.1.pt does not have the weights of layers\.1: delete it"):
        quantized(model(), folder=tmp_path)
    for changed, options in {
        "batches": {"data": batches(3)},
        "config": {"config": GPTQConfig(damping=0.1)},
        "weights": {"weight": "last.weight"},
        "weights ": {"weight": "mix.bias"},
    }.items():
        m = model()
        m.get_parameter(options.pop("weight", "last.weight")).data += changed.startswith("weights")
        with pytest.raises(ValueError, match=rf"a run with other {changed.strip()}: .*another folder"):
            quantized(m, folder=tmp_path, **options)


def test_layers_that_are_no_chain():
    class Crossed(Model):
        def forward(self, x):
            return self.last(self.layers[1](self.layers[0](x, mask=1)[0] * 2, mask=1)[0])

    torch.manual_seed(0)
    m = Crossed().eval()
    with pytest.raises(ValueError, match=r"the input of layers\.1 is not the output.*layers=\[\]"):
        gptq(m, batches(), progress=False)
    m.forward = lambda x: m.last(m.layers[0](x, mask=1)[0])
    with pytest.raises(ValueError, match=r"a batch reached 1 of the 2 layers from layers\.0 on"):
        gptq(m, batches(), progress=False)
    with pytest.raises(ValueError, match=r"given twice: give layers=\[\]"):
        gptq(m, batches(), layers=[m.layers[0]] * 2, progress=False)


def test_a_shared_weight_stays_dense_and_one_that_is_not_finite_is_named():
    m = model()
    m.embedding = nn.Embedding(40, WIDTH)
    m.embedding.weight = m.last.weight
    linears = {"filter_fn": lambda module, name: isinstance(module, nn.Linear), "progress": False}
    with pytest.warns(UserWarning, match=r"left dense.*last\.weight"):
        gptq(m, batches(), **linears)
    assert type(m.last) is nn.Linear and isinstance(m.layers[0].up.weight, NVFP4Tensor)
    m = model()
    m.layers[1].gate.weight.data[3, 5] = float("inf")
    with pytest.raises(ValueError, match=r"layers\.1\.gate\.weight has NaN or Inf"):
        gptq(m, batches(), **linears)
    assert type(m.layers[0].up) is nn.Linear


def test_training_mode_and_a_layers_own_forward_come_back():
    """accelerate sets hooks in the attribute ``forward`` of a module."""
    m, calls = model().train(), []
    forward = m.layers[0].forward

    def hooked(*arguments, **keywords):
        calls.append(m.training)
        return forward(*arguments, **keywords)

    m.layers[0].forward = hooked
    m.layers[1].eval()
    gptq(m, batches(2), progress=False)
    assert m.layers[0].forward is hooked and calls and not any(calls) and "forward" not in vars(m.layers[1])
    assert m.training and m.layers[0].training and not m.layers[1].training


class InPlace(nn.Module):
    """A layer that writes to its hidden states after a linear has read them, or makes new ones."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH)
        self.writes = False

    def forward(self, x):
        y = self.down(self.up(x).tanh())
        return x.add_(y) if self.writes else x + y


@pytest.mark.parametrize("options", [{}, {"dense_target_weight": 1.0, "sequential_within_layer": True}], ids=str)
def test_layers_may_write_to_what_they_are_given(options):
    torch.manual_seed(3)
    m = nn.Sequential(nn.Identity(), Chain(InPlace(), InPlace()))
    expected = quantized(m, GPTQConfig(**options))
    for layer in m[1].layers:
        layer.writes = True
    m[0] = nn.Dropout(0.0)  # a copy of the batch
    m[0].forward = torch.clone
    assert_same_codes(quantized(m, GPTQConfig(**options)), expected)


def test_a_later_weight_of_a_layer_is_fitted_to_what_the_quantized_ones_give():
    """With sequential_within_layer; by default to what the dense ones give."""
    torch.manual_seed(3)
    m = Chain(InPlace(), InPlace())

    def fitted(model, name):
        return quantized(model, filter_fn=lambda module, path: path == f"layers.0.{name}", layers=[])

    dense, apart = fitted(m, "down"), fitted(fitted(m, "up"), "down")
    for sequential, expected in ((True, apart), (False, dense)):
        own = quantized(m, GPTQConfig(sequential_within_layer=sequential)).layers[0].down.weight
        assert torch.equal(own.qdata, expected.layers[0].down.weight.qdata)
    assert not torch.equal(apart.layers[0].down.weight.qdata, dense.layers[0].down.weight.qdata)


BOTH = GPTQConfig(base_config=NVFP4Config(row_scaled=True), dense_target_weight=0.5)


def test_autocast_changes_nothing_but_what_the_model_computes():
    made = []
    for autocast in (False, True):
        m, data = model(), batches()
        for module in (*m.layers, m.mix):  # which compute in float32 even under autocast
            module.forward = torch.autocast("cpu", enabled=False)(module.forward)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            made.append(gptq(m, data, BOTH, filter_fn=inside, progress=False))
    assert_same_codes(*made)


def test_a_linear_used_several_times_learns_of_all():
    """A layer used several times is treated as one layer, with the rows of every use."""
    torch.manual_seed(0)
    layer = InPlace()
    with torch.no_grad():
        rows = [torch.cat((x, layer(x))).flatten(0, -2) for x in batches()]
    alone = quantized(nn.Sequential(layer.up), data=rows, layers=[])
    assert torch.equal(quantized(Chain(layer, layer)).layers[1].up.weight.qdata, alone[0].weight.qdata)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: gptq(model(), [], progress=False), ValueError, "give at least one batch"),
        (lambda: gptq(model(), torch.ones(4, 64), progress=False), TypeError, r"not one Tensor: pass \[batch\]"),
        (lambda: quantized(model(), layers=[nn.Linear(2, 2)]), ValueError, "modules of the model, and Linear is not"),
        (lambda: GPTQConfig(damping=0), ValueError, "damping must be positive"),
        (lambda: GPTQConfig(dense_target_weight=2), ValueError, "dense_target_weight must be from 0 to 1"),
        (lambda: GPTQConfig(base_config=NVFP4Config(block_rows=16)), ValueError, "block_rows=1, not 16"),
        (lambda: GPTQConfig(base_config=NVFP4Config(activation_round_mode="zero")), ValueError, "round_mode 'rne'"),
        (lambda: GPTQConfig(base_config=NVFP4Config(step="prepare")), ValueError, "are only for calibrate"),
        (lambda: GPTQConfig(base_config=QuantizeSpec()), TypeError, "base_config must be an NVFP4WeightOnlyConfig"),
    ],
)
def test_arguments_that_do_not_fit(make, error, message):
    with pytest.raises(error, match=message):
        make()


# --- transformers models ---------------------------------------------------------------------------------


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


@pytest.mark.gpu
def test_a_gpu_makes_the_same_weights():
    on_cpu, on_gpu = quantized(model()), gptq(model().cuda(), [x.cuda() for x in batches()], progress=False)
    for name, weight in weights(on_cpu).items():
        other = weights(on_gpu)[name]
        assert other.is_cuda and torch.equal(other.per_tensor_scale.cpu(), weight.per_tensor_scale)
        assert (other.dequantize().cpu() == weight.dequantize()).float().mean() > 0.97  # sums in another order
