"""A tiny dense model, batches, and short runs of distill."""

import torch

from helpers.tiny_models import tiny_model
from nvfp4_tensor import NVFP4Tensor
from nvfp4_tensor.training import DistillConfig, distill

SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "head_dim": 16, "vocab_size": 96}


def dense_model(family="Llama", **changes):
    return tiny_model(family, quantized=False, **{**SIZES, **changes})


def batches(count=6, vocabulary=96):
    generator = torch.Generator().manual_seed(0)
    return list(torch.randint(vocabulary, (count, 4, 24), generator=generator))


def trained(model=None, config=None, steps=12, **options):
    """Return the model and the loss of each step."""
    seen = []
    model = dense_model() if model is None else model
    config = DistillConfig(learning_rate=2e-3) if config is None else config
    model = distill(model, batches(), config, steps=steps, on_step=seen.append, progress=False, **options)
    return model, [each.loss for each in seen]


def weights_of(model):
    return {name: each.data for name, each in model.named_parameters() if isinstance(each.data, NVFP4Tensor)}


def same_bits(a, b):
    parts = [(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True)]
    for name in ("qdata", "scale", "per_tensor_scale"):
        parts += [(getattr(x, name), getattr(y, name)) for x, y in parts if isinstance(x, NVFP4Tensor)]
    return all(torch.equal(x, y) for x, y in parts if not isinstance(x, NVFP4Tensor))
