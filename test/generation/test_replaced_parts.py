"""Replace parts of a natively decoding model at random depth: what it then writes is what a new decoder writes.

After each change the logits equal, to the bit, those of a copy of the model, whose decoder makes a plan of its own, and
are near those of transformers' own forward.
"""

import copy
import random

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

pytest.importorskip("transformers")
from helpers.texts import relative_error, written
from helpers.tiny_models import MIXTURES, tiny_model
from torchao.quantization import quantize_

from nvfp4_tensor import NVFP4Config, NVFP4Tensor, NVFP4WeightOnlyConfig
from nvfp4_tensor.generation import decode_natively
from nvfp4_tensor.generation.decoder import Decoder

PROMPT = torch.arange(3, 11)[None]
SIZES = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 128, "head_dim": 16, "attention_bias": True}


def donor_of(model, seed):
    """Return a model of the same shapes with other values: weights, constants of norms, frequencies."""
    donor = decode_natively(copy.deepcopy(model), False)
    torch.manual_seed(seed)
    with torch.no_grad():
        for tensor in (*donor.parameters(), *donor.buffers()):
            noise = torch.rand_like(tensor.dequantize() if isinstance(tensor, NVFP4Tensor) else tensor.detach())
            tensor.mul_(0.5 + noise)
    return donor


def parts(rng, model, donor, found):
    """Return (holder, the donor's holder, name) of one of ``found(module)``, a dict, of a random module."""
    names = [name for name, each in model.named_modules() if found(each)]
    path = rng.choice(names)
    here, there = model.get_submodule(path), donor.get_submodule(path)
    return here, there, rng.choice(sorted(name for name, each in found(here).items() if each is not None))


def replace_module(rng, model, donor):
    here, there, name = parts(rng, model, donor, lambda module: module._modules)
    setattr(here, name, getattr(there, name))


def replace_parameter(rng, model, donor):
    here, there, name = parts(rng, model, donor, lambda module: module._parameters)
    setattr(here, name, getattr(there, name))


def replace_data(rng, model, donor):
    here, there, name = parts(rng, model, donor, lambda module: module._parameters)
    getattr(here, name).data = getattr(there, name).detach().clone()


def swap_tensors(rng, model, donor):
    here, there, name = parts(rng, model, donor, lambda module: module._parameters)
    torch.utils.swap_tensors(getattr(here, name), getattr(there, name))


@torch.no_grad()
def write(rng, model, donor):
    here, there, name = parts(rng, model, donor, lambda module: module._parameters)
    getattr(here, name).copy_(getattr(there, name))


def replace_buffer(rng, model, donor):
    here, there, name = parts(rng, model, donor, lambda module: module._buffers)
    if rng.random() < 0.5:
        setattr(here, name, getattr(there, name))
    else:
        getattr(here, name).copy_(getattr(there, name))


def set_constant(rng, model, donor):
    def constants(module):
        inside = module is not model and not isinstance(module, nn.Linear)
        return {name: value for name, value in vars(module).items() if inside and type(value) is float}

    here, _, name = parts(rng, model, donor, constants)
    value = getattr(here, name)
    setattr(here, name, value * 1.5)
    return lambda: setattr(here, name, value)  # a step on a CPU needs equal norms in a layer


def load_state_dict(rng, model, donor):
    model.load_state_dict(donor.state_dict(), assign=rng.random() < 0.5)


def replace_child(rng, model, donor):
    """A direct child of the inner model, whose children the plan reads."""
    name = rng.choice(["layers", "norm", "rotary_emb"])
    setattr(model.model, name, getattr(donor.model, name))


def new_list(rng, model, donor):
    layers = list(donor.model.layers if rng.random() < 0.5 else model.model.layers)
    model.model.layers = nn.ModuleList(layers)


def reverse_layers(rng, model, donor):
    layers = model.model.layers
    for name in rng.sample(["mlp", "input_layernorm", "self_attn"], 2):
        one, two = getattr(layers[0], name), getattr(layers[1], name)
        setattr(layers[0], name, two), setattr(layers[1], name, one)
    for i, layer in enumerate(layers):
        layer.self_attn.layer_idx = i


def quantize(rng, model, donor):
    if isinstance(model.lm_head.weight, NVFP4Tensor):
        return
    quantize_(model.lm_head, NVFP4WeightOnlyConfig())


def new_config(rng, model, donor):
    """Modules keep the old config, which may change by itself."""
    old, model.config = model.config, copy.deepcopy(model.config)
    model.model.config = model.config
    written(model, PROMPT, 3)
    for each in (old, model.config):
        each._attn_implementation = "eager"


def inner_hook(rng, model, donor):
    return model.model.register_forward_hook(lambda module, args, out: scaled(out)).remove


def parametrization(rng, model, donor):
    module = model.model.norm
    parametrize.register_parametrization(module, "weight", nn.Tanh())
    return lambda: parametrize.remove_parametrizations(module, "weight", leave_parametrized=rng.random() < 0.5)


def orthogonal(rng, model, donor):
    """torch's own parametrization of a dense output layer."""
    if isinstance(model.lm_head.weight, NVFP4Tensor) or parametrize.is_parametrized(model.lm_head):
        return None
    model.lm_head.float()
    parametrizations.weight_norm(model.lm_head)
    model.lm_head.bfloat16()
    return lambda: parametrize.remove_parametrizations(model.lm_head, "weight")


def patched_class(rng, model, donor):
    cls = type(model.model.norm if rng.random() < 0.5 else model.model)
    forward = cls.forward
    cls.forward = lambda self, *args, **kwargs: scaled(forward(self, *args, **kwargs))
    return lambda: setattr(cls, "forward", forward)


def scaled(output):
    if isinstance(output, torch.Tensor):
        return output * 1.5
    output["last_hidden_state"] = output[0] * 1.5
    return output


def quantize_activations(rng, model, donor):
    linear = model.model.layers[0].self_attn.q_proj
    old, linear.weight = linear.weight, nn.Parameter(linear.weight.detach().dequantize(), requires_grad=False)
    quantize_(linear, NVFP4Config())
    return lambda: setattr(linear, "weight", old)


CHANGES = [
    replace_module, replace_child, replace_parameter, replace_data, swap_tensors, write, replace_buffer, set_constant,
    load_state_dict, new_list, reverse_layers, quantize, new_config,
]  # fmt: skip
TAKEN_BACK = [inner_hook, parametrization, orthogonal, patched_class, quantize_activations]
"""Changes that a native step does not support. Those that are no part of the model would not be copied with it."""


def check(model, family, log):
    tokens, logits = written(model, PROMPT, 4)
    new = copy.deepcopy(model)
    assert torch.equal(written(new, PROMPT, 4, along=tokens)[1], logits), log
    own = decode_natively(new, False)
    error = relative_error(logits, written(own, PROMPT, 4, along=tokens)[1])
    assert error.median() < 0.1 if family in MIXTURES else error.max() < 0.06, (log, error)
    return logits


@pytest.mark.filterwarnings("ignore:tokens are decoded by transformers")
@pytest.mark.parametrize("on_cpu", [True, False], ids=["op", "graph"])
@pytest.mark.parametrize("family", ["Llama", "Qwen3Moe"])
def test_random_replacements(family, on_cpu):
    rng = random.Random(f"{family} {on_cpu}")
    model = tiny_model(family, tie_word_embeddings=False, **SIZES)
    decode_natively(model) if on_cpu else Decoder(model, by_operators=True).install()
    log, before, seen = [], None, 0
    for turn, change in enumerate(rng.sample(turns := [*CHANGES, *CHANGES[:4], *TAKEN_BACK], k=len(turns))):
        log.append(change.__name__)
        undo = change(rng, model, donor_of(model, turn))
        logits = check(model, family, log)
        seen += before is None or not torch.equal(logits, before)
        if undo is not None:
            log.append("undo")
            undo()
            logits = check(model, family, log)
        before = logits
    assert seen > 15, log
