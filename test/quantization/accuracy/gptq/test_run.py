"""GPTQ of models: the gain in accuracy, restoring after errors, and resuming."""

import copy

import pytest
import torch
from torch import nn
from torchao.quantization import quantize_

from nvfp4_tensor import NVFP4Config, NVFP4Tensor, NVFP4WeightOnlyConfig, QuantizeSpec, checkpoints
from nvfp4_tensor.quantization import GPTQConfig, gptq

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
    def __init__(self, layers=3):
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 40)

    def forward(self, x):
        x = torch.nn.functional.layer_norm(self.mix(x), (WIDTH,))
        for layer in self.layers:
            x = layer(hidden_states=x, mask=0.5)[0]
        return self.head(x)


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return Model().to(dtype).eval()


def batches(count=4, dtype=torch.float32):
    """Inputs with correlated columns, which GPTQ needs."""
    generator = torch.Generator().manual_seed(1)
    mix = torch.randn(8, WIDTH, generator=generator)
    return [
        (torch.randn(2, 40, 8, generator=generator) @ mix + 0.3 * torch.randn(2, 40, WIDTH, generator=generator)).to(
            dtype
        )
        for _ in range(count)
    ]


def error(quantized, dense, data):
    with torch.no_grad():
        return sum((quantized(x).float() - dense(x).float()).square().sum() for x in data).item()


def weights(m):
    return {name: module.weight for name, module in m.named_modules() if isinstance(module, nn.Linear)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"act_order": False},
        {"sequential_within_layer": True},
        {"dense_target_weight": 0.5},
        {"dense_target_weight": 1.0, "sequential_within_layer": True},
    ],
    ids=str,
)
def test_it_beats_nearest(options, dtype):
    dense = model(dtype)
    nearest, own = copy.deepcopy(dense), copy.deepcopy(dense)
    quantize_(nearest, SEARCH)
    config = GPTQConfig(base_config=SEARCH, **options)
    assert gptq(own, batches(dtype=dtype), config, progress=False) is own
    assert all(isinstance(w, NVFP4Tensor) and w.dtype == dtype for w in weights(own).values())
    unseen = batches(7, dtype)[4:]
    assert error(own, dense, unseen) < 0.7 * error(nearest, dense, unseen)


def test_aiming_at_the_dense_model_helps():
    torch.manual_seed(0)
    dense, errors = Model(4).eval(), {}
    data = batches(20)
    for share in (0.0, 1.0):
        own = copy.deepcopy(dense)
        gptq(own, data[:16], GPTQConfig(dense_target_weight=share, sequential_within_layer=True), progress=False)
        errors[share] = error(own, dense, data[16:])
    assert errors[1.0] < 0.99 * errors[0.0]


def test_w4a4_makes_up_for_the_activations():
    dense = model(torch.bfloat16)
    nearest, own = copy.deepcopy(dense), copy.deepcopy(dense)
    quantize_(nearest, NVFP4Config())
    gptq(own, batches(dtype=torch.bfloat16), NVFP4Config(), progress=False)
    assert all(w.activation_spec == QuantizeSpec() for w in weights(own).values())
    unseen = batches(7, torch.bfloat16)[4:]
    assert error(own, dense, unseen) < 0.45 * error(nearest, dense, unseen)


def test_weights_with_row_scales():
    """Rows whose magnitudes differ by 2^40: with one scale per weight the small ones would become zeros."""
    spec, sizes = QuantizeSpec(scale_search="mse", row_scaled=True), 2.0 ** torch.linspace(-20, 20, 96).unsqueeze(1)
    m, plain = model(), model()
    for each in (m, plain):
        each.layers[0].up.weight.data *= sizes

    def up(module, name):
        return name == "layers.0.up"

    gptq(m, batches(), NVFP4WeightOnlyConfig(weight_spec=spec), filter_fn=up, progress=False)
    weight = m.layers[0].up.weight
    assert weight.per_tensor_scale.shape == (96,) and weight.spec == spec
    dense = plain.layers[0].up.weight
    assert ((weight.dequantize() - dense).norm(dim=1) < 0.35 * dense.norm(dim=1)).all()


class Attention(nn.Module):
    """q, k and v with weights of other magnitudes; v has an input of its own, which comes after the output of q."""

    def __init__(self):
        super().__init__()
        for i, name in enumerate(("q_proj", "k_proj", "v_proj", "o_proj")):
            setattr(self, name, nn.Linear(WIDTH, WIDTH))
            getattr(self, name).weight.data *= 2.0**i

    def forward(self, x):
        inner = self.q_proj(x) * self.k_proj(x).tanh()
        return x + self.o_proj(inner * self.v_proj(inner.tanh()))


@pytest.mark.parametrize(
    "options",
    [{}, {"sequential_within_layer": True}, {"dense_target_weight": 0.5}, {"base_config": NVFP4Config()}],
    ids=str,
)
def test_linears_that_servers_join_share_a_scale(options, tmp_path, monkeypatch):
    torch.manual_seed(0)
    shared = nn.Sequential()
    shared.layers = nn.ModuleList(Attention() for _ in range(2))
    alone, config = copy.deepcopy(shared), GPTQConfig(**options)
    for m in (shared, alone):
        m.forward = lambda x, m=m: m.layers[1](m.layers[0](x))
    gptq(shared, batches(), config, progress=False)
    with monkeypatch.context() as patch:
        patch.setattr("nvfp4_tensor.quantization.accuracy.gptq.run._joined", lambda model, targets: {})
        gptq(alone, batches(), config, progress=False)

    def scales(layer):
        return [getattr(layer, f"{each}_proj").weight.per_tensor_scale for each in "qkvo"]

    assert scales(shared.layers[0])[0] == max(scales(alone.layers[0])[:3])
    for layer in shared.layers:
        q, k, v, o = scales(layer)
        assert q == k == v != o
    del shared.forward
    checkpoints.save(shared, tmp_path / "q", mismatched_scales="refuse", weight_only=True, progress=False)


def test_a_model_without_layers_is_taken_as_a_whole():
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(WIDTH, 96), nn.ReLU(), nn.Linear(96, 40))
    nearest, own, forced = (copy.deepcopy(dense) for _ in range(3))
    quantize_(nearest, SEARCH)
    gptq(own, batches(), SEARCH, progress=False)
    assert error(own, dense, batches(7)[4:]) < 0.7 * error(nearest, dense, batches(7)[4:])
    whole = model()
    gptq(whole, batches(), layers=[], progress=False)
    assert all(isinstance(w, NVFP4Tensor) for w in weights(whole).values())
    gptq(forced, batches(), SEARCH, filter_fn=lambda module, name: name == "0", progress=False)
    assert isinstance(forced[0].weight, NVFP4Tensor) and type(forced[2]) is nn.Linear


class _Stopped(Exception):
    pass


def _stop_after(monkeypatch, layers):
    """Raise after the given number of saved layers."""
    from nvfp4_tensor.quantization.accuracy.gptq.folder import Finished

    save, saved = Finished.save, []

    def stopping(self, name, weights):
        save(self, name, weights)
        saved.append(name)
        if len(saved) == layers:
            raise _Stopped

    monkeypatch.setattr(Finished, "save", stopping)


def test_a_run_goes_on_behind_what_it_finished(tmp_path, monkeypatch):
    once = gptq(model(), batches(), progress=False)
    m = model()
    with monkeypatch.context() as patch:
        _stop_after(patch, 2)
        with pytest.raises(_Stopped):
            gptq(m, batches(), folder=tmp_path, progress=False)
    assert all(type(module) is nn.Linear for module in m.modules() if isinstance(module, nn.Linear))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["layers.0.pt", "layers.1.pt", "settings.json"]
    written = (tmp_path / "layers.0.pt").stat().st_mtime_ns
    gptq(m, batches(), folder=tmp_path, progress=False)
    assert (tmp_path / "layers.0.pt").stat().st_mtime_ns == written
    for name, weight in weights(m).items():
        assert torch.equal(weight.qdata, weights(once)[name].qdata), name
        assert torch.equal(weight.scale.view(torch.uint8), weights(once)[name].scale.view(torch.uint8)), name
    again = gptq(model(), batches(), folder=tmp_path, progress=False)
    assert torch.equal(again.head.weight.qdata, m.head.weight.qdata)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"data": 3}, "batches"),
        ({"config": GPTQConfig(damping=0.1)}, "config"),
        ({"weight": "head.weight"}, "weights"),
        ({"weight": "mix.bias"}, "weights"),
    ],
)
def test_a_folder_belongs_to_one_run(tmp_path, changed, named):
    gptq(model(), batches(2), folder=tmp_path, progress=False)
    m = model()
    if "weight" in changed:
        m.get_parameter(changed["weight"]).data += 1
    with pytest.raises(ValueError, match=rf"a run with other {named}: .*another folder"):
        gptq(m, batches(changed.get("data", 2)), changed.get("config"), folder=tmp_path, progress=False)
    assert type(m.head) is nn.Linear


def test_layers_that_are_no_chain():
    class Crossed(Model):
        def forward(self, x):
            return self.head(self.layers[2](self.layers[0](x, mask=1)[0] * 2, mask=1)[0])

    torch.manual_seed(0)
    m = Crossed().eval()
    with pytest.raises(ValueError, match=r"the input of layers\.2 is not the output.*layers=\[\]"):
        gptq(m, batches(), progress=False)
    m.layers = m.layers[:2]
    m.forward = lambda x: m.head(m.layers[0](x, mask=1)[0])
    with pytest.raises(ValueError, match=r"a batch reached 1 of the 2 layers from layers\.0 on"):
        gptq(m, batches(), progress=False)


def test_a_shared_weight_stays_dense():
    m = model()
    m.head = nn.Linear(WIDTH, 40)
    m.embedding = nn.Embedding(40, WIDTH)
    m.embedding.weight = m.head.weight
    with pytest.warns(UserWarning, match=r"left dense.*head\.weight"):
        gptq(m, batches(), filter_fn=lambda module, name: isinstance(module, nn.Linear), progress=False)
    assert type(m.head) is nn.Linear and isinstance(m.layers[0].up.weight, NVFP4Tensor)


def test_training_mode_comes_back():
    m = model()
    m.train()
    m.layers[1].eval()
    gptq(m, batches(2), progress=False)
    assert m.training and m.layers[0].training and not m.layers[1].training


class InPlace(nn.Module):
    """A layer that writes to its hidden states after a linear has read them, or makes new ones."""

    def __init__(self, writes):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH)
        self.writes = writes

    def forward(self, x):
        y = self.down(self.up(x).tanh())
        return x.add_(y) if self.writes else x + y


@pytest.mark.parametrize("options", [{}, {"dense_target_weight": 1.0, "sequential_within_layer": True}], ids=str)
def test_layers_may_write_to_what_they_are_given(options):
    made = []
    for writes in (False, True):
        m = model()
        torch.manual_seed(3)
        m.layers = nn.ModuleList(InPlace(writes) for _ in range(3))
        m.forward = lambda x, m=m: m.head(m.layers[2](m.layers[1](m.layers[0](1 * x))))
        gptq(m, batches(), GPTQConfig(**options), filter_fn=_inside, progress=False)
        made.append(m)
    assert_same_codes(*made)


def assert_same_codes(a, b):
    a, b = ({name: w for name, w in weights(m).items() if isinstance(w, NVFP4Tensor)} for m in (a, b))
    assert a and a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name].qdata, b[name].qdata), name
        assert torch.equal(a[name].scale.view(torch.uint8), b[name].scale.view(torch.uint8)), name
        assert torch.equal(a[name].per_tensor_scale, b[name].per_tensor_scale), name


@pytest.fixture(scope="module")
def with_usual_defaults():
    return gptq(_layers_alone(), batches(), _BOTH, filter_fn=_inside, progress=False)


_BOTH = GPTQConfig(base_config=NVFP4Config(row_scaled=True), dense_target_weight=0.5)


def _inside(module, name):
    return isinstance(module, nn.Linear) and "layers." in name


def _layers_alone():
    """A model whose layers compute in float32 even under autocast."""
    m = model()
    for layer in m.layers:
        layer.forward = torch.autocast("cpu", enabled=False)(layer.forward)
    m.mix.forward = torch.autocast("cpu", enabled=False)(m.mix.forward)
    return m


def test_defaults_of_torch_change_nothing(with_usual_defaults, other_defaults):
    m, data = other_defaults(lambda: (_layers_alone(), batches()))
    assert_same_codes(gptq(m, data, _BOTH, filter_fn=_inside, progress=False), with_usual_defaults)


def test_autocast_changes_nothing_but_what_the_model_computes(with_usual_defaults):
    m, data = _layers_alone(), batches()
    with torch.autocast("cpu", torch.bfloat16):
        gptq(m, data, _BOTH, filter_fn=_inside, progress=False)
    assert_same_codes(m, with_usual_defaults)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named(value):
    m = model()
    m.layers[1].gate.weight.data[3, 5] = value
    with pytest.raises(ValueError, match=r"layers\.1\.gate\.weight has NaN or Inf"):
        gptq(m, batches(), progress=False)
    assert all(type(module) is nn.Linear for module in m.modules() if isinstance(module, nn.Linear))


def test_a_linear_used_several_times_learns_of_all():
    """A layer used several times is treated as one layer, with the rows of every use."""

    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            layer = InPlace(False)
            self.layers = nn.ModuleList([layer, layer])

        def forward(self, x):
            return self.layers[1](self.layers[0](x))

    torch.manual_seed(0)
    dense = Again()
    own = gptq(copy.deepcopy(dense), batches(), progress=False)
    by_hand = copy.deepcopy(dense)
    up, layer = by_hand.layers[0].up, by_hand.layers[0]
    with torch.no_grad():
        rows = [torch.cat((x, layer(x))).flatten(0, -2) for x in batches()]
    alone = nn.Sequential(copy.deepcopy(up))
    gptq(alone, rows, layers=[], progress=False)
    assert torch.equal(own.layers[1].up.weight.qdata, alone[0].weight.qdata)
    with pytest.raises(ValueError, match=r"given twice: give layers=\[\]"):
        gptq(dense, batches(), layers=list(dense.layers), progress=False)


def test_a_layers_own_forward_comes_back():
    """accelerate sets hooks in the attribute ``forward`` of a module."""
    m, calls = model(), []
    forward = m.layers[0].forward

    def hooked(*arguments, **keywords):
        calls.append(1)
        return forward(*arguments, **keywords)

    m.layers[0].forward = hooked
    gptq(m, batches(2), progress=False)
    assert m.layers[0].forward is hooked and calls and "forward" not in vars(m.layers[1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gptq(model(), [], progress=False), "give at least one batch"),
        (lambda: gptq(model(), batches(1), layers=[nn.Linear(2, 2)], progress=False), "modules of the model"),
        (lambda: GPTQConfig(damping=0), "damping must be positive"),
        (lambda: GPTQConfig(dense_target_weight=2), "dense_target_weight must be from 0 to 1"),
        (lambda: GPTQConfig(base_config=NVFP4WeightOnlyConfig(block_rows=16)), "block_rows=1"),
        (lambda: GPTQConfig(base_config=NVFP4WeightOnlyConfig(round_mode="stochastic")), "round_mode 'rne'"),
        (lambda: GPTQConfig(base_config=NVFP4Config(step="prepare")), "are only for calibrate"),
    ],
)
def test_arguments_that_do_not_fit(make, message):
    with pytest.raises(ValueError, match=message):
        make()
    with pytest.raises(TypeError, match="base_config must be an NVFP4WeightOnlyConfig"):
        GPTQConfig(base_config=QuantizeSpec())


@pytest.mark.gpu
def test_a_gpu_makes_the_same_weights():
    on_cpu, on_gpu = model(), model().cuda()
    gptq(on_cpu, batches(), progress=False)
    gptq(on_gpu, [x.cuda() for x in batches()], progress=False)
    for name, weight in weights(on_cpu).items():
        other = weights(on_gpu)[name]
        assert other.is_cuda and torch.equal(other.per_tensor_scale.cpu(), weight.per_tensor_scale)
        assert (other.dequantize().cpu() == weight.dequantize()).float().mean() > 0.97  # sums in another order
