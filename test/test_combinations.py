"""Every pair of features once: kinds of models with each other, kinds with uses, and uses with each other.

Numbers are compared with a model that has one of the features alone. What cannot be done raises the error that
:data:`REFUSED` has. No pair is left out.
"""

import contextlib
import functools
import itertools
import warnings

import pytest
import torch

pytest.importorskip("nvfp4_tensor.integrations.transformers", exc_type=ImportError)
pytest.importorskip("peft")
from helpers.combinations import KINDS, USES, Subject, add_adapters, dense, inner, results_of_linears
from helpers.texts import relative_error

CODES = ["weight-only", "w4a4", "w4a4 static", "row scales", "fp8", "gptq", "experts"]
"""Kinds for inference. Their linears cannot be quantized again."""
STORED = ["nvfp4 adamw", "nvfp4 optimizer"]
QUANTIZES_ACTIVATIONS = ["w4a4", "w4a4 static", "row scales", "training", "qat"]

REFUSED = {
    **{(kind, "decode_natively"): (ValueError, "needs a weight-only model") for kind in CODES[1:4]},
    **{(kind, "decode_natively"): (ValueError, "NVFP4TrainingLinear") for kind in ("training", "qat")},
    ("lora", "decode_natively"): (ValueError, "TorchaoLoraLinear"),
    **{(kind, use): (ValueError, "input scale") for kind in ("w4a4", "row scales")
       for use in ("checkpoints", "save_pretrained")},
    **{("lora", use): (ValueError, "merge_lora") for use in ("checkpoints", "save_pretrained")},
    ("nvfp4 optimizer", "fsdp2"): (ValueError, "would change the scale of all shards"),
    ("fsdp2", "decode_natively"): (TypeError, "FSDPLlamaForCausalLM"),
    ("fsdp2", "deepcopy"): (AssertionError, "FSDP does not support deepcopy"),  # torch's own, as the next two
    ("fsdp2", "pickle"): (Exception, "Can't pickle <class 'torch.distributed.fsdp"),
    ("fsdp2", "export"): (RuntimeError, "DTensor|symbolic"),
    ("fsdp2", "checkpoints"): (ValueError, "full_state_dict"),
    ("fsdp2", "save_pretrained"): (ValueError, "full_state_dict"),
}  # fmt: skip
"""By pair: the error, and words of its message."""


def pairs(first, second=None):
    """Parametrize a test with pairs of names."""
    found = itertools.combinations(first, 2) if second is None else itertools.product(first, second)
    return pytest.mark.parametrize("one, two", [pytest.param(*pair, id=" + ".join(pair)) for pair in found])


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def assert_same(found, expected, bound=0.0):
    """Check that the results are those expected, to the bit if bound is 0. Gradients of what is frozen are left out."""
    outputs = {name for name in expected if not name.startswith("d ") and ": d " not in name}
    assert outputs and outputs <= set(found)
    for name in set(found) & set(expected):
        if bound and name != "tokens":
            error = relative_error(found[name].float(), expected[name].float())
            assert error.max() < bound, (name, error.max())
        else:
            assert torch.equal(found[name], expected[name]), (name, relative_error(found[name], expected[name]).max())


# --- kinds and uses, uses and uses -----------------------------------------------------------------------------------


@functools.cache
def alone(name, mode):
    """Return what a kind computes without any use."""
    return Subject.of(KINDS[name], mode).measure()


def used(kind, *uses):
    """Return what a model of the kind computes after the uses, and what it computes without."""
    mode = max((use.mode for use in uses), key=["logits", "linears", "tokens"].index)
    expected = alone(kind, mode)
    with contextlib.ExitStack() as stack:
        for use in uses:
            stack.enter_context(use.start())
        subject = Subject.of(KINDS[kind], mode)
        with subject.rest:
            for use in uses:
                use.apply(subject)
            return subject.measure(along=expected.get("tokens")), expected


def bound_of(kind, *uses):
    bound = max(use.bound for use in uses)
    return 2 * bound if kind in QUANTIZES_ACTIVATIONS else bound


@pairs(KINDS, USES)
def test_a_kind_in_use(one, two):
    if refused := REFUSED.get((one, two)):
        with pytest.raises(refused[0], match=refused[1]):
            used(one, USES[two])
        return
    found, expected = used(one, USES[two])
    if two in ("checkpoints", "save_pretrained"):
        expected = mirror_of_files(one) or expected
    if (one, two) == ("experts", "autocast"):  # torch's grouped products are not autocast
        experts = [{name: t for name, t in each.items() if "experts" in name} for each in (found, expected)]
        assert_same(*experts, 0.01)
        found, expected = ({n: t for n, t in each.items() if "experts" not in n} for each in (found, expected))
    trained_apart = one in STORED and two == "save_pretrained"  # fused weights get one per-tensor scale again
    assert_same(found, expected, 0.1 if trained_apart else bound_of(one, USES[two]))
    if USES[two].mode == "tokens":  # it has an effect
        assert not torch.equal(found["logits"], expected["logits"])


def mirror_of_files(kind):
    """Return what a model from a file computes where that is not what the model in memory computes."""
    if kind in ("training", "qat"):  # files have the dense weights
        model = dense()
    elif kind == "fp8":  # no format says how a product is computed
        model = KINDS["fp8"].model()
        for linear in (module for name, module in model.named_modules() if inner(module, name)):
            linear.weight = torch.nn.Parameter(linear.weight.detach()._replace(product_backend="auto"), False)
    else:
        return None
    with torch.no_grad():
        return {"logits": model(KINDS[kind].text()).logits}


@pairs(USES)
def test_two_uses(one, two):
    """Of a weight-only model."""
    if refused := REFUSED.get((one, two)):
        with pytest.raises(refused[0], match=refused[1]):
            used("weight-only", USES[one], USES[two])
        return
    found, expected = used("weight-only", USES[one], USES[two])
    if two == "export":  # no linear is left in what was exported
        expected = {name: value for name, value in expected.items() if ".0.mlp." not in name}
    assert_same(found, expected, bound_of("weight-only", USES[one], USES[two]))


# --- kinds and kinds -------------------------------------------------------------------------------------------------


def first_half(module, name):
    return inner(module, name) and any(each in name for each in ("q_proj", "k_proj", "v_proj"))


def second_half(module, name):
    return inner(module, name) and not first_half(module, name)


BY_INPUTS = ["w4a4 static", "gptq"]
"""Kinds that read the inputs of linears, which other quantized linears change: they come first."""


@pairs(KINDS)
def test_side_by_side(one, two):
    """In one model, each linear computes what it computes in a model of its own kind."""
    one, two = sorted((one, two), key=lambda name: name not in BY_INPUTS)
    family = "Mixtral" if "experts" in (one, two) else "Llama"
    halves = {one: first_half, two: second_half}
    model, rows = KINDS[one].model(halves[one], family=family), max(KINDS[each].tokens for each in (one, two))
    KINDS[two].apply(model, halves[two])
    found = results_of_linears(model, rows=rows)
    for name in (one, two):
        single = results_of_linears(KINDS[name].model(halves[name], family=family), rows=rows)
        mine = {
            key: value for key, value in single.items()
            if (name == "experts" if "experts" in key else halves[name](torch.nn.Linear(1, 1), key))
        }  # fmt: skip
        if name == two and two in BY_INPUTS:
            assert_same(found, {key: value for key, value in mine.items() if ":" not in key}, 0.5)
        else:
            assert_same(found, mine)
    with torch.no_grad():
        assert model(KINDS[one].text()).logits.isfinite().all()


def after(one, two):
    """Return what quantizing a model of kind ``one`` as kind ``two`` gives: an error, or the kinds that it equals."""
    trained = ("training", "qat")
    if two == "lora":
        return one
    if one == "lora":
        return (ValueError, "is frozen") if two in trained else two
    if one in trained:
        return (ValueError, "trains in NVFP4 already") if two in trained else two
    if one in CODES or two in ("gptq", *trained):
        return (ValueError, "NVFP4 already")
    return one if two == "weight-only" else two  # codes that trained stay, whatever the config says of weights


@pytest.mark.parametrize(
    "one, two", [pytest.param(*pair, id=" then ".join(pair)) for pair in itertools.permutations(KINDS, 2)]
)
def test_one_after_the_other(one, two):
    """The same linears, first as one kind, then as the other."""
    family, outcome = "Mixtral" if "experts" in (one, two) else "Llama", after(one, two)
    model = apply(one, dense(family)) if one == "lora" else KINDS[one].model(family=family)
    if isinstance(outcome, tuple):
        before = dict(model.named_parameters())
        with pytest.raises(outcome[0], match=outcome[1]):
            apply(two, model)
        now = dict(model.named_parameters())
        assert now.keys() == before.keys() and all(now[name] is each for name, each in before.items())
        return
    apply(two, model)
    expected = KINDS[outcome].model(family=family)
    if "lora" in (one, two):
        apply("lora", expected)
    bound = 0.5 if one in ("lora", *STORED) and two in BY_INPUTS else 0  # their inputs are others
    rows = max(KINDS[each].tokens for each in (one, two))
    assert_same(results_of_linears(model, rows=rows), results_of_linears(expected, rows=rows), bound)


def apply(kind, model):
    """Quantize a model as a kind. That of adapters quantizes nothing here."""
    torch.manual_seed(7)
    add_adapters(model, inner) if kind == "lora" else KINDS[kind].apply(model, inner)
    return model
