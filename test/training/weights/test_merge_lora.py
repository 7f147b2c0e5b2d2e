"""Every kind of adapter in peft is merged, rounded once by the formula, or raises an error and changes nothing."""

import copy
import random

import pytest
import torch
from helpers.bits import equal_bits
from helpers.refusals import refuses
from torch import nn
from torchao.quantization import quantize_

from nvfp4_tensor import NVFP4Config, NVFP4Tensor, NVFP4WeightOnlyConfig, QuantizeSpec, quantize
from nvfp4_tensor.numerics import reference
from nvfp4_tensor.numerics.random_state import rng_state_of
from nvfp4_tensor.training import merge_lora, merge_low_rank, refit_
from nvfp4_tensor.training.weights.write_back import write_back

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 32, 48) / 6)
        self.down = nn.Parameter(torch.randn(3, 48, 32) / 6)

    def forward(self, x):
        return sum(torch.relu(x @ up) @ down for up, down in zip(self.up, self.down, strict=True))


class Network(nn.Module):
    """One module of each kind; the linears "q" and "o" are NVFP4, "block.0", "dense" and "head" are not."""

    def __init__(self, tied=False, dtype=torch.float32):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.q = nn.Linear(32, 48)
        self.o = nn.Linear(48, 32, bias=False)
        self.conv = nn.Conv1d(32, 32, 3, padding=1)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.experts = Experts()
        self.block = nn.Sequential(nn.Linear(32, 32))
        self.dense = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 50, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.to(dtype)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.o(torch.relu(self.q(x)))
        x = x + self.conv(x.mT).mT
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.experts(x) + self.block(x)
        return self.head(self.norm(x + torch.relu(self.dense(x))))


def network(nvfp4=("q", "o"), config=None, **options):
    torch.manual_seed(0)
    model = Network(**options)
    if nvfp4:
        quantize_(model, config or NVFP4WeightOnlyConfig(), filter_fn=lambda module, name: name in nvfp4)
    return model


def randomize(model):
    """Adapters as training leaves them: every parameter that trains has moved."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and not isinstance(parameter, NVFP4Tensor):
                parameter += torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 0.1
    return model.eval()


def lora(targets, base=None, **options):
    config = peft.LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": targets, "init_lora_weights": False, **options}
    )
    return randomize(peft.get_peft_model(network() if base is None else base, config))


def with_second(model, targets, active=("default", "second"), **options):
    """The model with another adapter beside its first."""
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False, **options))
    model.base_model.set_adapter(list(active))
    return randomize(model)


def changed(change):
    change(model := lora(["q", "dense"]))
    return model


ROTATED = QuantizeSpec(hadamard_sign=True)
ALL = ["q", "o", "block.0", "dense", "embed", "conv", "head"]
TOKENS = torch.arange(40).view(4, 10) % 50

MERGED = {
    "plain": lambda: lora(["q", "o", "dense"]),
    "rslora": lambda: lora(["q", "dense"], use_rslora=True),
    "rank pattern": lambda: lora(["q", "o"], rank_pattern={"q": 8}, alpha_pattern={"o": 3}),
    "all bfloat16": lambda: lora(ALL, network(dtype=torch.bfloat16)),
    "dora of dense weights": lambda: lora(["dense", "embed", "conv"], use_dora=True),
    "trainable tokens": lambda: lora(["q"], trainable_token_indices={"embed": [1, 5, 7]}),
    "modules to save": lambda: lora(["q", "o"], modules_to_save=["norm", "head", "embed"]),
    "bias all": lambda: lora(["q", "dense"], bias="all"),
    "lora bias of a dense weight": lambda: lora(["dense", "conv"], lora_bias=True),
    "parameters": lambda: lora(["q"], target_parameters=["experts.up"]),
    "the parameter of an NVFP4 linear": lambda: lora(["dense"], target_parameters=["q.weight"]),
    "several": lambda: with_second(lora(["q", "o", "dense"]), ["q", "dense", "embed"]),
    "tokens of a saved module": lambda: with_second(
        lora(["q"], trainable_token_indices={"embed": [1, 5, 7]}), ["dense"], modules_to_save=["embed"]
    ),
    **{
        f"adapters within a saved module, {active} active": lambda active=active: with_second(
            lora(["q", "block.0"], network(("block.0",))), ["dense"], active, modules_to_save=["block"]
        )
        for active in (("default", "second"), ("default",))
    },
    "dense alone": lambda: lora(ALL, network(nvfp4=())),
    "attention": lambda: lora(["q", "attention"]),
}  # fmt: skip


REFUSED = {
    "dora": (lambda: lora(["dense", "q"], use_dora=True), "q is not plain LoRA but Dora"),
    "attention in NVFP4": (
        lambda: lora(["q", "attention"], network(("q", "attention.out_proj"))),
        "MultiheadAttention on an NVFP4",
    ),
    "tied embedding": (lambda: lora(["q", "embed"], network(tied=True)), "embed.base_layer.weight is tied to .*head"),
    "tied tokens": (
        lambda: lora(["q"], network(tied=True), trainable_token_indices={"embed": [3]}),
        "embed.*weight is tied to base_model.model.head.weight",
    ),
    "an adapter on modules to save": (
        lambda: with_second(lora(["q"], network(("q", "head")), modules_to_save=["head"]), ["head"]),
        "an adapter on a ModulesToSaveWrapper",
    ),
    "alora": (lambda: lora(["dense"], alora_invocation_tokens=[1]), "ALoraLinearVariant, which peft does not merge"),
    "lora bias without a bias": (lambda: lora(["head"], lora_bias=True), "no bias to merge it into"),
    "disabled": (lambda: changed(lambda model: model.disable_adapter_layers()), "are disabled"),
    "merged": (lambda: changed(lambda model: model.base_model.model.dense.merge()), "was merged already"),
    "nan": (
        lambda: changed(lambda model: model.base_model.model.dense.lora_A["default"].weight.data.fill_(torch.nan)),
        "NaN or infinity",
    ),
    "hadamard": (
        lambda: lora(["q"], network(config=NVFP4Config(weight_spec=ROTATED, activation_spec=ROTATED))), "Hadamard"
    ),
    "AdaLora": (
        lambda: peft.get_peft_model(network(), peft.AdaLoraConfig(target_modules=["dense"], total_step=10)),
        "not AdaLoraModel",
    ),
}  # fmt: skip


def running(module, name=""):
    """The modules that run, by the names that they have once what peft saves whole is unwrapped."""
    if isinstance(module, peft.utils.other.ModulesToSaveWrapper):
        active = module.active_adapters
        module = module.modules_to_save[active[0]] if active else module.original_module
    yield name, module
    for part, child in module.named_children():
        yield from running(child, f"{name}.{part}".removeprefix("."))


def sums(model):
    """Decoded weight plus deltas, by the names that the merged model has."""
    found = {}
    for name, layer in running(model.base_model.model):
        weight = isinstance(layer, peft.tuners.lora.LoraLayer) and getattr(layer.get_base_layer(), "weight", None)
        if isinstance(weight, NVFP4Tensor):
            deltas = [layer.get_delta_weight(adapter) for adapter in layer.active_adapters if adapter in layer.lora_A]
            found[name] = weight.dequantize() + sum(deltas)
    return found


def outputs(model):
    """Of a copy, because the forward of peft's MultiheadAttention merges, and unmerges to a dense weight."""
    with torch.no_grad():
        return copy.deepcopy(model)(TOKENS).float()


def check_merged(model):
    """NVFP4 weights are the sum within their rounding; with the sums in their place, the outputs are equal.

    In bfloat16, whose last bit decides between large logits of the attention, the weights are those of a float32 copy.
    """
    copied = copy.deepcopy(model).float()
    merged = merge_lora(model, seed=0)
    assert isinstance(merged, Network)
    assert not any(isinstance(m, peft.tuners.tuners_utils.BaseTunerLayer) for m in merged.modules())
    if merged.norm.weight.dtype == torch.bfloat16:
        exact = check_merged(copied)
        for got, expected in zip(merged.parameters(), exact.parameters(), strict=True):
            assert type(got) is type(expected) and got.dtype == torch.bfloat16
            got, expected = (p.dequantize() if isinstance(p, NVFP4Tensor) else p for p in (got, expected))
            assert (got - expected).norm() <= 2**-7 * expected.norm()
        return merged
    with torch.no_grad():
        apart, expected = outputs(copied), sums(copied)
    summed = copy.deepcopy(merged)
    for name, total in expected.items():
        linear = summed.get_submodule(name)
        assert isinstance(linear.weight, NVFP4Tensor)
        assert (linear.weight.dequantize() - total).norm() < 0.2 * total.norm()
        linear.weight = nn.Parameter(total)
    assert (outputs(summed) - apart).norm() < 1e-4 * apart.norm()
    return merged


def check_raises(model, message):
    apart, state = outputs(model), copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        merge_lora(model, seed=0)
    now = model.state_dict()
    assert now.keys() == state.keys()
    for name, value in state.items():
        pair = [t.dequantize() if isinstance(t, NVFP4Tensor) else t for t in (value, now[name])]
        assert torch.allclose(*pair, rtol=0, atol=0, equal_nan=True)
    assert torch.allclose(outputs(model), apart, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", MERGED)
def test_merged(kind):
    check_merged(MERGED[kind]())


@pytest.mark.parametrize("kind", REFUSED)
def test_errors_leave_the_model_unchanged(kind):
    make, message = REFUSED[kind]
    check_raises(make(), message)


# --- values ----------------------------------------------------------------------------------------------------------


def pair(n=40, k=72, r=4):
    generator = torch.Generator().manual_seed(0)
    normal = [torch.randn(shape, generator=generator) for shape in ((n, k), (r, k), (n, r))]
    return normal[0], normal[1] / 10, normal[2] / 10


SPECS = [
    QuantizeSpec(),
    QuantizeSpec(block_rows=16),
    QuantizeSpec(four_over_six=True),
    QuantizeSpec(scale_search="mse"),
]


@pytest.mark.parametrize(
    "spec, dtype", [*((spec, torch.float32) for spec in SPECS), (SPECS[0], torch.bfloat16)], ids=str
)
def test_the_formula(spec, dtype):
    """To nearest, by the reference alone, from the decoded codes to the new ones."""
    x, a, b = pair()
    w = quantize(x.to(dtype), spec)
    decoded = reference.dequantize(w.qdata, w.scale, w.per_tensor_scale, 72, torch.float32)
    total = decoded + (b.to(dtype).float() @ a.to(dtype).float()) * 0.5
    merged = merge_low_rank(w, a.to(dtype), b.to(dtype), 0.5, round_mode="rne")
    expected = reference.quantize(total, reference.amax(total), None, spec)
    assert equal_bits((merged.qdata, merged.scale, merged.per_tensor_scale), expected)
    assert merged.spec == spec and merged.dtype == dtype and merged.shape == w.shape


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_noise_is_in_proportion_to_the_delta(spec):
    """It is write_back's: a delta of 0.2 % costs less than half of what quantizing the sum anew would, none nothing."""
    x, a, b = pair(64, 256)
    w, exact = quantize(x, spec), b @ a
    scaling = 0.002 * w.dequantize().norm() / exact.norm()
    total, rng_state = w.dequantize() + exact * scaling, torch.tensor([11, 12])
    merged = merge_low_rank(w, a, b, scaling.item(), rng_state=rng_state)
    expected = write_back(w, exact * scaling, rng_state=rng_state)
    assert equal_bits((merged.qdata, merged.scale), (expected.qdata, expected.scale)) and merged.spec == spec
    anew = quantize(total, spec.with_round_mode("stochastic"), rng_state=rng_state)
    assert (merged.dequantize() - total).norm() < 0.5 * (anew.dequantize() - total).norm()
    assert torch.equal(merge_low_rank(w, a, 0 * b, rng_state=rng_state).dequantize(), w.dequantize())


@pytest.mark.parametrize("config", [NVFP4WeightOnlyConfig(), NVFP4Config()], ids=["weight only", "w4a4"])
def test_linears_of_a_model_are_merged_in_place_and_rounded_once(config):
    """The sum of both adapters, by a seed and the linear's name; without a seed, torch's generator draws one."""
    codes = []
    for seed in (5, 5, 6, None):
        model = with_second(lora(["q", "o"], network(config=config)), ["q"], lora_alpha=2)
        layer = model.base_model.model.q
        before, total = layer.base_layer.weight.clone(), sum(map(layer.get_delta_weight, ("default", "second")))
        address = layer.base_layer.weight.data_ptr()
        weight = merge_lora(model, seed=seed).q.weight
        assert weight.data_ptr() == address and weight.activation_spec == getattr(config, "activation", None)
        codes.append(weight.qdata)
    rng_state = rng_state_of("merge", 5, "base_model.model.q", 0, total.device)
    assert torch.equal(codes[0], write_back(before, total.detach(), rng_state=rng_state).qdata)
    assert torch.equal(codes[0], codes[1])
    assert not any(torch.equal(codes[0], other) for other in codes[2:])


@pytest.mark.parametrize("mode", ["rne", "stochastic"])
@pytest.mark.parametrize(("adapted", "size"), [("qv", 0.01), ("qv", 3.0), ("qkv", 1.0)])
def test_what_shares_a_scale_goes_on_sharing_one(adapted, size, mode):
    """What has no adapter keeps its values; with all merged to nearest, the bits are those of quantize_ of the sums."""
    torch.manual_seed(0)
    base = nn.ModuleDict({f"{name}_proj": nn.Linear(32, rows) for name, rows in (("q", 48), ("k", 16), ("v", 16))})
    quantize_(base, NVFP4WeightOnlyConfig())
    sums = {f"{name}_proj.weight": base[f"{name}_proj"].weight.dequantize() for name in "qkv"}
    config = peft.LoraConfig(r=4, target_modules=[f"{name}_proj" for name in adapted], init_lora_weights=False)
    new = copy.deepcopy(base)
    model = peft.get_peft_model(base, config)
    for name in adapted:
        layer = model.base_model.model[f"{name}_proj"]
        layer.lora_B["default"].weight.data *= size
        sums[f"{name}_proj.weight"] += layer.get_delta_weight("default")
    model = merge_lora(model, round_mode=mode, seed=3)
    merged = {name: p for name, p in model.named_parameters() if name in sums}
    scales = {p.per_tensor_scale.item() for p in merged.values()}
    assert len(scales) == 1
    for name, exact in sums.items():
        expected, old = exact, new.get_parameter(name)
        if name[0] in adapted and mode == "rne":
            expected = quantize(exact, amax=scales.copy().pop() * 2688).dequantize()
        elif name[0] in adapted:
            rng_state = rng_state_of("merge", 3, f"base_model.model.{name.removesuffix('.weight')}", 0, exact.device)
            expected = write_back(old, (exact - old.dequantize()).detach(), rng_state=rng_state).dequantize()
        torch.testing.assert_close(merged[name].dequantize(), expected, rtol=1e-6, atol=1e-7)
    if adapted == "qkv" and mode == "rne":
        refit_(new, sums, strict=False)
        assert all(torch.equal(merged[name].qdata, new.get_parameter(name).qdata) for name in sums)


def merged_pair(change):
    return lambda: merge_low_rank(*change(*pair()))


test_errors_of_a_pair = refuses(
    (merged_pair(lambda x, a, b: (x, a, b)), TypeError, "quantize it first"),
    (merged_pair(lambda x, a, b: (quantize(x).mT, a, b)), "not transposed"),
    (merged_pair(lambda x, a, b: (quantize(x[:8]), a, b)), r"\(r, K\) and \(N, r\)"),
    (merged_pair(lambda x, a, b: (quantize(x), a[0], b)), r"\(r, K\) and \(N, r\)"),
    (merged_pair(lambda x, a, b: (quantize(x), a[:3], b)), r"\(r, K\) and \(N, r\)"),
    (lambda: merge_lora(nn.Sequential(nn.Linear(8, 8))), TypeError, r"takes a peft\.PeftModel"),
)


# --- mixtures --------------------------------------------------------------------------------------------------------


def drawn(seed):
    """Return a model with several kinds of adapters, or peft's error if it does not support them."""
    draw = random.Random(seed)

    def some(values, least=0):
        return draw.sample(values, draw.randint(least, min(len(values), 4)))

    def options():
        one = {"target_modules": some([*ALL, "attention"], 1), "r": draw.choice([1, 4]), "init_lora_weights": False}
        one |= draw.choice([{}, {}, {"use_rslora": True}, {"use_dora": True}, {"lora_bias": True}])
        one |= draw.choice([{}, {}, {"alora_invocation_tokens": [1]}, {"bias": "all"}, {"bias": "lora_only"}])
        one |= draw.choice([{}, {"trainable_token_indices": {"embed": some(range(50), 1)}}])
        one |= draw.choice([{}, {"modules_to_save": some(["norm", "head", "block", "dense", "embed"], 1)}])
        one |= draw.choice([{}, {}, {"target_parameters": some(["experts.up", "experts.down", "q.weight"], 1)}])
        return one

    dtype = draw.choice([torch.float32, torch.float32, torch.bfloat16])
    base = network(some(["q", "o", "block.0", "dense", "head"]), tied=draw.random() < 0.2, dtype=dtype)
    try:
        model = peft.get_peft_model(base, peft.LoraConfig(**options()))
        if draw.random() < 0.4:
            model.add_adapter("second", peft.LoraConfig(**options()))
            active = [["default", "second"], ["default"], ["second"], ["second", "default"]]
            model.base_model.set_adapter(draw.choice(active))
        randomize(model)
        outputs(model)
    except Exception as error:
        return error
    return model


def check_drawn(seed):
    """Whether merging the model raised no error."""
    model = drawn(seed)
    if isinstance(model, Exception):
        return False
    try:
        merge_lora(copy.deepcopy(model), seed=0)
    except ValueError:
        check_raises(model, "")
        return False
    check_merged(model)
    return True


def test_some_mixtures():
    assert sum(check_drawn(seed) for seed in range(25)) >= 3


@pytest.mark.exhaustive
@pytest.mark.parametrize("start", range(1000, 3000, 100))
def test_mixtures(start):
    assert sum(check_drawn(seed) for seed in range(start, start + 100)) >= 10
