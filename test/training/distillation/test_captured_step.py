"""The captured step of distill: the bits of eager steps, whatever the batches; models that cannot be captured."""

import dataclasses
import warnings

import pytest
import torch
from helpers.distillation import batches, dense_model, same_bits, trained

from nvfp4_tensor.training import DistillConfig, distill
from nvfp4_tensor.training.distillation import captured_step

pytestmark = pytest.mark.gpu
CONFIG = DistillConfig(learning_rate=5e-4)


def on_gpu(given=None, config=CONFIG, steps=10, model=None, **options):
    """The model after some steps, and the losses."""
    seen, model = [], (dense_model() if model is None else model).cuda()
    given = [ids.cuda() for ids in batches()] if given is None else given
    distill(model, given, config, steps=steps, on_step=seen.append, progress=False, **options)
    return model, [each.loss for each in seen]


@pytest.mark.parametrize("batches_per_step", [1, 2])
def test_replays_have_the_bits_of_eager_steps(batches_per_step, monkeypatch):
    """Also with a batch of another shape among them, whose steps stay eager."""
    config = DistillConfig(learning_rate=5e-4, batches_per_step=batches_per_step)
    given = [each.cuda() for each in (*batches(3), batches(1)[0][:2])]
    replays = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda self: (replays.append(1), replay(self))[1])
    model, losses = on_gpu(given, config, steps=16)
    assert len(replays) > 4
    monkeypatch.setattr(captured_step, "_EAGER_STEPS", 100)
    eager, expected = on_gpu(given, config, steps=16)
    assert losses == expected and same_bits(model, eager) and losses[-1] < losses[0]


def test_a_run_that_stops_goes_on_to_the_same_bits(tmp_path):
    whole, losses = on_gpu(steps=12)

    def stop(progress):
        if progress.step == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distill(dense_model().cuda(), [ids.cuda() for ids in batches()], CONFIG, steps=12, on_step=stop,
                folder=tmp_path, progress=False)  # fmt: skip
    model, rest = on_gpu(steps=12, folder=tmp_path)
    assert rest == losses[7:] and same_bits(model, whole)
    _, after = trained(config=CONFIG, steps=14, folder=tmp_path)  # a folder moves to another device
    assert len(after) == 2 and after[-1] < losses[0]


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_a_model_that_waits_for_the_device_is_not_captured(part):
    """Gradients of a backward that was captured in part have no values."""
    model = dense_model()
    seen = []
    norm = (
        model.model.norm if part == "forward" else model.model.layers[1].input_layernorm
    )  # the first one's input has no gradient
    register = getattr(norm, {"forward": "register_forward_pre_hook", "backward": "register_full_backward_hook"}[part])
    register(lambda module, values, *_: seen.append(values[0].sum().item()))
    with pytest.warns(UserWarning, match="the model waits for the device .* one by one"):
        _, losses = on_gpu(model=model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, expected = on_gpu()
    assert len(seen) >= 10 and losses == expected
    assert torch.rand(2, device="cuda").isfinite().all(), "the generator draws again"


def test_compiled_blocks_are_replayed(monkeypatch):
    """Compiled before the capture, which makes no attention mask that other steps do without.

    Replays have the bits of compiled steps that are not captured. Fused kernels round otherwise than eager ones, so
    only the first loss, of the same weights, is near theirs (on an H200 0.4 %, and 9 % at the eighth step; weights
    that are nudged by half a percent part by 30 %).
    """
    compiled = dataclasses.replace(CONFIG, compile=True)
    replays = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda self: (replays.append(1), replay(self))[1])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the model waits for the device")
        model, losses = on_gpu(config=compiled)
    assert len(replays) == 7
    monkeypatch.setattr(captured_step, "_EAGER_STEPS", 100)
    launched, expected = on_gpu(config=compiled)
    _, eager = on_gpu(steps=1)
    assert len(replays) == 7
    assert losses == expected and same_bits(model, launched)
    assert losses[0] == pytest.approx(eager[0], rel=0.01) and losses[-1] < losses[0]
