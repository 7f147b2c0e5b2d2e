"""QLoRA of a real model that is sharded over two processes by FSDP2: python tutorials/qlora_two_ranks.py

The linears of SmolLM2-135M-Instruct's layers are frozen in NVFP4. Each rank stores half of the codes, and only codes
are all-gathered. peft's adapters are trained in float32. Use torchrun for other numbers of ranks and for GPUs.
"""

import argparse
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.run import main as torchrun
from torchao.quantization import quantize_

from nvfp4_tensor import NVFP4Tensor, NVFP4WeightOnlyConfig

try:
    import peft

    from nvfp4_cli.demo.model import evaluation_tokens, gguf_path, load_model

    gguf_path()
except (ImportError, FileNotFoundError) as missing:
    raise SystemExit(f"this tutorial needs peft and the packages of the demo: {missing}") from None


def adapted(device):
    """Return the float32 model with NVFP4 linears, and adapters that have the same values on every rank."""
    model, tokenizer = load_model()
    model = model.float().to(device)
    quantize_(model.model.layers, NVFP4WeightOnlyConfig())
    torch.manual_seed(0)
    config = peft.LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    return peft.get_peft_model(model, config), tokenizer


def held(model):
    """Return the bytes of NVFP4 weights on this rank and on all ranks."""
    shards = [p.to_local() for p in model.parameters() if isinstance(p.to_local(), NVFP4Tensor)]
    here = torch.tensor([sum(getattr(t, name).nbytes for t in shards for name in ("qdata", "scale"))])
    everywhere = here.clone().to(shards[0].device)
    dist.all_reduce(everywhere)
    return here.item(), everywhere.item()


def main(options):
    on_gpus = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo", timeout=timedelta(seconds=300))
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (world,))

    model, tokenizer = adapted(device)
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    local, total = held(model)
    if rank == 0:
        print(f"NVFP4 weights: {local / 1e6:.1f} MB on this rank of {total / 1e6:.1f} MB on {world}", flush=True)

    tokens = evaluation_tokens(tokenizer, options.tokens * world * options.steps).view(options.steps, world, -1)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)

    def loss_of(step):
        text = tokens[step, rank][None].to(device)
        return model(input_ids=text, labels=text).loss

    def mean(loss):
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        return loss.item() / world

    before = mean(loss_of(0))
    for step in range(options.steps):
        optimizer.zero_grad()
        loss = loss_of(step)
        loss.backward()
        optimizer.step()
        average = mean(loss)
        if rank == 0:
            print(f"step {step + 1} of {options.steps}: loss {average:.3f}", flush=True)
    after = mean(loss_of(0))
    full = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    adapters = {name: t for name, t in get_model_state_dict(model, options=full).items() if "lora_" in name}
    if rank == 0:
        torch.save(adapters, options.output)
        print(f"loss on the first texts {before:.3f} -> {after:.3f}; {len(adapters)} adapters in {options.output}")
        assert after < before
        assert len(adapters) == 2 * 4 * len(model.base_model.model.model.layers)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=96, help="tokens per rank and step")
    parser.add_argument("--output", default="adapters.pt")
    chosen = parser.parse_args()
    if "RANK" in os.environ:
        main(chosen)
    else:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        torchrun(["--standalone", "--nproc-per-node", "2", __file__, *sys.argv[1:]])
