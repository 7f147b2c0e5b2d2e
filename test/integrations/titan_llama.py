"""torchtitan's Trainer with its debug Llama on CPU ranks, of :func:`helpers.run_ranks.run_ranks` or its own train.py.

    PYTHONPATH=test torchrun --nproc-per-node 2 test/integrations/titan_llama.py \\
        --module integrations.titan_llama --config debug_llama_on_cpu \\
        --override.imports 'nvfp4_tensor.integrations.torchtitan.nvfp4_linear={"recipe":"nvidia"}'
"""

import json
import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from nvfp4_tensor.training import NVFP4TrainingLinear, set_recipe

SENTENCES = ["The quick brown fox jumps over the lazy dog. ", "Pack my box with five dozen liquor jugs. "]
OVERRIDE = "nvfp4_tensor.integrations.torchtitan.nvfp4_linear"
_AS_OF_A_GPU = {
    "current_device": lambda: 0,  # torch.cpu's is a string
    "get_device_name": lambda *_: "cpu",
    "get_device_properties": lambda *_: SimpleNamespace(total_memory=1),
    "reset_peak_memory_stats": lambda: None,
    "empty_cache": lambda: None,
    "memory_stats": lambda *_: {},
}
"""The functions of a device module, mainly of memory, that torchtitan needs and torch.cpu does not have."""


def rank() -> str:
    """Return the rank in the running process group, or the one set by torchrun."""
    return str(dist.get_rank()) if dist.is_initialized() else os.environ["RANK"]


def use_cpu() -> None:
    """Call this before importing torchtitan, which assumes a CUDA device even without a GPU."""
    import torchtitan.tools.utils as utils

    utils.device_type, utils.device_module = "cpu", torch.cpu
    for name, function in _AS_OF_A_GPU.items():
        setattr(torch.cpu, name, function)
    os.environ["LOCAL_RANK"] = rank()
    torch.autograd.set_multithreading_enabled(False)  # as torchtitan does when it starts the ranks itself


def _write_tokenizer(folder: str) -> None:
    """Write a tokenizer with one token per byte."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    os.makedirs(folder, exist_ok=True)
    tokenizer.save(f"{folder}/tokenizer.json")
    with open(f"{folder}/tokenizer_config.json", "w") as file:
        json.dump({"bos_token": "<s>", "eos_token": "</s>"}, file)


def debug_llama(folder: str, steps: int):
    """Return a Trainer.Config of the debug Llama, with attention without document masks, which trains on CPUs."""
    use_cpu()
    from datasets import Dataset
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    config.model_spec = model_registry("debugmodel")
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    DATASETS["sentences"] = DatasetConfig(
        path="",
        loader=lambda _: Dataset.from_dict({"text": [s * 8 for s in SENTENCES] * 64}),
        sample_processor=lambda sample: sample["text"],
    )
    config.dataloader = HuggingFaceTextDataLoader.Config(dataset="sentences")
    config.hf_assets_path = config.dump_folder = f"{folder}/{rank()}"
    _write_tokenizer(config.hf_assets_path)
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 4, 64, steps
    config.training.disable_cuda_graphs = True
    config.parallelism.spmd_backend = "partial_dtensor"  # spmd_types needs an FSDP2 later than torch 2.13's
    config.validator.enable = config.checkpoint.enable = False
    return config


def debug_llama_on_cpu():
    """Return the config for ``--module integrations.titan_llama --config debug_llama_on_cpu`` of torchtitan."""
    return debug_llama(os.environ["TITAN_FOLDER"], steps=6)


def sum_by_gloo(trainer) -> None:
    """Let FSDP2 sum gradients without a scale, which gloo does not have."""
    for part in trainer.model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)


def losses_of(trainer, before_step=None) -> list[float]:
    """Train to the end, and return the loss of each step over all ranks. Calls ``before_step(step)``, from step 1."""
    losses, forward_backward = [], trainer.fwd_bwd_fn

    def recorded(*args):
        if before_step is not None:
            before_step(trainer.step)
        losses.append(forward_backward(*args))
        return losses[-1]

    trainer.fwd_bwd_fn = recorded
    batches = trainer.batch_generator(trainer.dataloader)
    for step in range(1, trainer.config.training.steps + 1):  # train() needs torch.distributed.set_timeout, after 2.13
        trainer.step = step
        trainer.train_step(batches)
    losses = [loss.detach() for loss in losses]  # under tensor parallelism, of all its ranks
    losses = [loss.full_tensor() if isinstance(loss, DTensor) else loss for loss in losses]
    summed = torch.stack([loss.float() for loss in losses])
    if trainer.parallel_dims.dp_enabled:  # each rank's is a part of the whole's
        dist.all_reduce(summed, group=trainer.parallel_dims.get_mesh("batch").get_group())
    trainer.close()
    return summed.tolist()


def trained(folder, recipe, switch_at=None, tp=1, steps=10):
    """Return the losses, the number of our linears, and whether their forward ended dense."""
    config = debug_llama(folder, steps)
    config.parallelism.tensor_parallel_degree = tp
    config.override.imports = [(OVERRIDE, {"recipe": recipe})] if recipe else []
    trainer = config.build()
    (model,) = trainer.model_parts
    sum_by_gloo(trainer)

    def before_step(step):
        if step == switch_at:
            set_recipe(model, forward="bf16")

    losses = losses_of(trainer, before_step)
    linears = [module for module in model.modules() if isinstance(module, NVFP4TrainingLinear)]
    return losses, len(linears), {(linear.bf16_forward, linear.bf16_backward) for linear in linears}


def refused(folder):
    config = debug_llama(folder, 1)
    config.parallelism.spmd_backend = "full_dtensor"
    config.override.imports = [(OVERRIDE, {})]
    with pytest.raises(ValueError, match="to spmd_types or partial_dtensor"):
        config.build()


def main() -> None:
    """Run torchtitan's own train.py."""
    use_cpu()
    from torchtitan.train import Trainer
    from torchtitan.train import main as train_main

    train = Trainer.train

    def on_gloo(trainer):
        sum_by_gloo(trainer)
        if not hasattr(dist, "set_timeout"):  # torch 2.13
            dist.set_timeout = lambda *args, **how: None
        return train(trainer)

    Trainer.train = on_gloo
    train_main()


if __name__ == "__main__":
    main()
