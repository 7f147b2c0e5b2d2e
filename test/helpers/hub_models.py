"""Small models of transformers with random weights."""

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel


def random_model(config: PretrainedConfig) -> PreTrainedModel:
    """Return a bfloat16 model, equal at each call, whose parameters are large enough to affect the logits."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model
