"""distill: the loss falls, the model ends as trained, and a run that stops goes on to the same bits."""

import contextlib
import copy
import dataclasses
import itertools

import pytest
import torch
from helpers.distillation import batches, dense_model, same_bits, trained, weights_of
from helpers.refusals import refuses
from torch import nn
from torch.nn.functional import kl_div
from torch.optim.optimizer import register_optimizer_step_post_hook

from nvfp4_tensor import NVFP4Config, NVFP4WeightOnlyConfig, QuantizeSpec, quantize_model
from nvfp4_tensor.quantization import gptq
from nvfp4_tensor.training import DistillConfig, distill
from nvfp4_tensor.training.distillation import divergence as loss

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("reverse", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("masked", "compiled"), [(False, False), (True, False), (True, True)])
def test_divergence_and_gradient(reverse, masked, compiled, monkeypatch):
    """Against autograd in float64."""
    monkeypatch.setattr(loss, "_CHUNK", 3 * 50)  # three rows at a time, and a rest
    monkeypatch.setattr(loss, "_compiled_rows", torch.compile(loss._of_rows, backend="aot_eager"))
    torch.manual_seed(0)
    student, teacher = (torch.randn(2, 7, 50) * 3 for _ in range(2))
    mask = torch.rand(2, 7) < 0.6 if masked else torch.ones(2, 7, dtype=torch.bool)
    own = student.clone().requires_grad_()
    found = loss.divergence(own, teacher, mask if masked else None, reverse=reverse, compiled=compiled)
    (3 * found).backward()
    x = student.double().requires_grad_()
    log_q, log_p = x.log_softmax(-1)[mask], teacher.double().log_softmax(-1)[mask]
    both = [kl_div(a, b, reduction="sum", log_target=True) for a, b in ((log_q, log_p), (log_p, log_q))]
    wanted = ((1 - reverse) * both[0] + reverse * both[1]) / mask.sum()
    (3 * wanted).backward()
    torch.testing.assert_close(found.double(), wanted.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(own.grad.double(), x.grad, rtol=1e-4, atol=1e-7)


CONFIGS = {
    "w4a16": DistillConfig(base_config=NVFP4WeightOnlyConfig()),
    "w4a4": DistillConfig(),
    "static": DistillConfig(static=True, reverse=0.5),
    "rows": DistillConfig(base_config=NVFP4Config(row_scaled=True), reverse=1.0),
    "search": DistillConfig(base_config=NVFP4Config(weight_spec=QuantizeSpec(scale_search="mse")), hidden=0.1),
    "tiles": DistillConfig(base_config=NVFP4Config(block_rows=16), batches_per_step=2),
    "nvfp4": DistillConfig(nvfp4_masters=True),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_loss_falls_and_is_that_of_the_deployed_model(name, capfd):
    """A fifth less of the loss, on batches that training sees; after reloading it is the same number."""
    config, ids, same = dataclasses.replace(CONFIGS[name], learning_rate=5e-4), batches()[0], []

    def runs_as_deployed(progress):
        if progress.step == 3:
            y = model(ids).logits
            with torch.inference_mode():
                same.append(y.requires_grad and torch.equal(y, model(ids).logits))

    model = dense_model()
    distill(model, batches(), config, steps=40, on_step=runs_as_deployed)
    said = capfd.readouterr().err
    words = next(line for line in said.splitlines() if line.startswith("loss ")).split()
    before, after, reloaded = (float(words[i]) for i in (1, 4, 8))
    assert same == [True]
    assert after == reloaded < 0.8 * before
    assert "distilling 33 parameters with 0.1 M elements: masters" in said
    weights = weights_of(model)
    assert len(weights) == 14 and {each.spec for each in weights.values()} == {
        (config.base_config or NVFP4Config()).weight
    }
    assert all((each.activation_amax is not None) == config.static for each in weights.values())
    for layer in model.model.layers:  # servers join these: one scale
        scales = [getattr(layer.self_attn, f"{each}_proj").weight.per_tensor_scale for each in "qkv"]
        assert name == "rows" or all(torch.equal(scales[0], scale) for scale in scales)
    required = {name for name, each in model.named_parameters() if each.requires_grad}
    assert required == {name for name, _ in model.named_parameters()} - set(weights)


def test_a_scale_is_doubled_when_an_element_outgrows_it():
    """Other blocks keep their values: each change of a per-tensor scale is by a power of two, in all joined linears."""
    model = dense_model()
    quantize_model(start := copy.deepcopy(model), NVFP4Config())
    trained(model, DistillConfig(learning_rate=0.02), steps=8)
    factors = {
        name: (each.per_tensor_scale / weights_of(start)[name].per_tensor_scale).item()
        for name, each in weights_of(model).items()
    }
    assert {2.0} <= set(factors.values()) <= {1.0, 2.0}
    for name, factor in factors.items():
        assert factor == factors[name.replace("k_proj", "q_proj").replace("v_proj", "q_proj").replace("up_", "gate_")]


def test_gptq_codes_are_where_training_begins():
    """The first loss is that of GPTQ's model, within the few blocks whose scale is chosen anew, and below nearest."""
    exact, fitted = dense_model(), dense_model()
    config = NVFP4Config(scale_search="mse", activation_spec=QuantizeSpec())
    gptq(fitted, batches(), config, progress=False)
    quantize_model(nearest := dense_model(), NVFP4Config())
    own = {n: each.clone() for n, each in weights_of(fitted).items()}
    losses = [
        trained(model, DistillConfig(learning_rate=0.0), steps=1, teacher=exact)[1][0] for model in (fitted, nearest)
    ]
    assert losses[0] < losses[1]
    kept = [(own[n].qdata == each.qdata).float().mean().item() for n, each in weights_of(fitted).items()]
    assert min(kept) > 0.9


# --- interruptions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [DistillConfig(static=True), DistillConfig(nvfp4_masters=True)], ids=["", "nvfp4"])
def test_a_run_that_stops_goes_on_to_the_same_bits(config, tmp_path):
    whole, losses = trained(config=config)
    model, dense, seen = dense_model(), dense_model(), []

    def stop(progress):
        seen.append(progress.loss)
        if progress.step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distill(model, batches(), config, steps=12, on_step=stop, folder=tmp_path, progress=False)
    assert same_bits(model, dense) and all(each.requires_grad for each in model.parameters())  # dense again
    updates = itertools.count(6)

    def stop_within(*_):  # between the optimizer's step and what follows from it
        if next(updates) == 8:
            raise KeyboardInterrupt

    hook = register_optimizer_step_post_hook(stop_within)
    with pytest.raises(KeyboardInterrupt):
        distill(model, batches(), config, steps=12, folder=tmp_path, progress=False)
    hook.remove()
    model, rest = trained(model, config, folder=tmp_path)
    assert seen + rest == losses
    assert same_bits(model, whole)
    other = dense_model()
    with torch.no_grad():
        other.model.norm.weight[3] += 1
    for what, *differing in (
        ("config", dense_model(), batches(), dataclasses.replace(config, seed=1)),
        ("weights", other, batches(), config),
        ("batches", dense_model(), [ids.flip(1) for ids in batches()], config),
    ):
        with pytest.raises(ValueError, match=f"has a run with other {what}: resume with the same"):
            distill(*differing, folder=tmp_path, progress=False)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_trains_whatever_the_callers_mode_is(mode):
    """As calibrate and gptq, which are called in the same block."""
    model, whole, ids = dense_model(), dense_model(), batches()
    with mode():
        distill(model, ids, DistillConfig(static=True), steps=2, progress=False)
    distill(whole, ids, DistillConfig(static=True), steps=2, progress=False)
    assert same_bits(model, whole)


def test_a_loss_that_is_not_finite_restores_the_model():
    model, broken = dense_model(), dense_model()
    with torch.no_grad():
        broken.model.norm.weight[3] = torch.nan
    with pytest.raises(RuntimeError, match=r"loss of step 0 is nan: look for NaN .* or lower learning_rate \(0.002\)"):
        trained(quantized := copy.deepcopy(model), teacher=broken)
    assert same_bits(quantized, model)


@pytest.mark.parametrize("fails", [False, True])
def test_hooks_that_record_hidden_states_do_not_stay(fails):
    """A user's hook does; and hidden states can be recorded afterwards."""
    model, teacher = dense_model(), dense_model()
    model.lm_head.register_forward_hook(lambda *_: None)

    def step(progress):
        if fails:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) if fails else contextlib.nullcontext():
        distill(model, batches(), DistillConfig(hidden=0.1), teacher=teacher, steps=1, on_step=step, progress=False)
    assert [name for name, each in model.named_modules() if each._forward_hooks] == ["lm_head"]
    assert not any(each._forward_hooks for each in teacher.modules())
    for each in (model, teacher):
        assert len(each(batches()[0], output_hidden_states=True).hidden_states) == 3


# --- refusals --------------------------------------------------------------------------------------------------------


def of(**arguments):
    return lambda: DistillConfig(**arguments)


test_refused_configs = refuses(
    (of(reverse=2), "reverse is a share, from 0 to 1, got 2"),
    (of(learning_rate=-1), "learning_rate must be finite and not negative"),
    (of(batches_per_step=0), "batches_per_step is a whole number from 1 on"),
    (of(trains="heads"), "unknown trains 'heads'"),
    (of(base_config=QuantizeSpec()), TypeError, "base_config must be an NVFP4WeightOnlyConfig or NVFP4Config"),
    (of(base_config=NVFP4Config(round_mode="stochastic")), "rounded to nearest"),
    (of(base_config=NVFP4Config(step="prepare")), "step and weighted are for calibrate"),
    (of(base_config=NVFP4WeightOnlyConfig(), static=True), "static=True needs activations"),
)


@pytest.mark.parametrize(
    "given, options, error, message",
    [
        ([], {}, ValueError, "give at least one batch"),
        (batches(1)[0], {}, TypeError, r"not one Tensor: pass \[batch\]"),
        (None, {"steps": 0}, ValueError, "steps is a whole number"),
        (None, {"minutes": 0}, ValueError, "minutes must be above 0"),
        (None, {"config": DistillConfig(trains="adapters")}, ValueError, "nothing to train: LlamaForCausalLM has no"),
        (None, {"teacher": nn.Embedding(96, 7)}, ValueError, "the logits are .* and the teacher's .* same vocabulary"),
    ],
)
def test_refused_calls_leave_the_model_dense(given, options, error, message):
    model = dense_model()
    with pytest.raises(error, match=message):
        distill(model, batches() if given is None else given, **{"steps": 1, "progress": False, **options})
    assert same_bits(model, dense_model())


def test_a_quantized_model_needs_a_teacher_and_keeps_its_format():
    quantize_model(model := dense_model(), NVFP4WeightOnlyConfig())
    for options in ({}, {"teacher": dense_model(), "config": NVFP4Config()}):
        with pytest.raises(ValueError, match="is quantized already: give the dense model as teacher="):
            distill(model, batches(), steps=1, progress=False, **options)
    trained(model, teacher=dense_model(), steps=2)
    assert {each.activation_spec for each in weights_of(model).values()} == {None}


def test_models_that_are_no_language_models():
    """Any module that returns logits, with batches of any form, and a mask of the tokens that count."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 48))
    given, seen = [(torch.randn(8, 32),), torch.randn(2, 5, 32)], []
    config = DistillConfig(base_config=NVFP4Config(), learning_rate=1e-3)
    distill(model, given, config, filter_fn=lambda module, name: isinstance(module, nn.Linear), steps=40,
            on_step=seen.append, progress=False)  # fmt: skip
    assert seen[-1].loss < 0.8 * seen[0].loss
    with pytest.raises(TypeError, match="hidden compares the hidden states of transformers"):
        distill(nn.Sequential(nn.Linear(32, 32)), given, DistillConfig(hidden=1.0), progress=False)
