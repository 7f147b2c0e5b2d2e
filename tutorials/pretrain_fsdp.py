"""Pre-train a small Llama in NVFP4 with FSDP2, on GPUs with NCCL or on CPUs with gloo.

    python tutorials/pretrain_fsdp.py                                    # starts two ranks with torchrun
    torchrun --nproc-per-node 4 tutorials/pretrain_fsdp.py --size 2m     # or start the ranks yourself
    python tutorials/pretrain_fsdp.py --steps 80 --resume --ranks 1      # resumes on another number of ranks

Weights are float32 shards, and codes are all-gathered, 0.28 of bfloat16's bytes, quantized with the amax of the full
weight. Tokens and random bits depend on the step, not on the rank, so the loss of a step is independent of the number
of ranks, up to the order of summation, and a checkpoint can be resumed on another number of ranks.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import sysconfig
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.run import main as torchrun
from torchao.quantization import quantize_
from tqdm import tqdm
from train_llama import SHAPES, Llama, corpus

from nvfp4_tensor import distributed, training

SEED = 0


class Run:
    """A sharded model, its optimizer and the current step."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.device, self.step = options, device, 0
        self.mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
        torch.manual_seed(SEED)  # the same weights on each rank, before they are sharded
        self.model = Llama(SHAPES[options.size], options.length).to(device)
        if options.recipe != "bf16":
            self._quantize(options.recipe)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in self.model.layers:
            fully_shard(layer, mesh=self.mesh, mp_policy=policy)
        fully_shard(self.model, mesh=self.mesh, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.learning_rate, betas=(0.9, 0.95))

    def _quantize(self, recipe: str) -> None:
        config = training.NVFP4TrainingConfig(recipe)
        quantize_(self.model, config, filter_fn=training.keep_dense("head"))
        distributed.set_token_sharding(self.model, self.mesh)
        distributed.seed_rounding(self.model, SEED)
        distributed.enable_nvfp4_all_gather(self.model)

    def train_step(self, text: Tensor) -> float:
        """Train one step and return the mean loss of the batch over all ranks."""
        quantized = self.options.recipe != "bf16"
        if quantized:
            distributed.set_step(self.model, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        tokens = self.tokens(text)
        logits = self.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if quantized:
            distributed.precompute_amaxes(self.model)
        self.step += 1
        mean = loss.detach()
        dist.all_reduce(mean)
        return mean.item() / dist.get_world_size()

    def tokens(self, text: Tensor) -> Tensor:
        """Return this rank's share of the step's windows, which are independent of the number of ranks."""
        options = self.options
        generator = torch.Generator().manual_seed(1_000_003 * SEED + self.step)
        starts = torch.randint(len(text) - options.length, (options.batch,), generator=generator)
        mine = starts.chunk(dist.get_world_size())[dist.get_rank()]
        return text[mine[:, None] + torch.arange(options.length + 1)].long().to(self.device)

    def learning_rate(self) -> float:
        """Return the learning rate: linear warm-up over 20 steps, then cosine decay to a tenth."""
        done = min(self.step / self.options.planned, 1.0)
        warm = min((self.step + 1) / 20, 1.0)
        return self.options.learning_rate * warm * (0.55 + 0.45 * math.cos(math.pi * done))

    def save(self, folder: Path) -> None:
        """Save a sharded checkpoint: each rank writes its shards."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer, "step": torch.tensor(self.step)}, checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        """Load a checkpoint from any number of ranks."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer, "step": torch.tensor(0)}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        self.step = int(state["step"])


def train(options: argparse.Namespace) -> None:
    """Run one rank."""
    on_gpus = torch.cuda.is_available() and not options.cpu
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=options.timeout)  # if a rank fails, the others stop after this time
    dist.init_process_group("nccl" if on_gpus else "gloo", timeout=timeout)
    try:
        text, _ = corpus(options.text, options.limit)
        run = Run(options, device)
        folder = options.output / "checkpoint"
        if options.resume:
            run.load(folder)
        first = dist.get_rank() == 0
        with tqdm(total=options.steps, initial=run.step, unit="step", disable=not first, mininterval=1) as bar:
            while run.step < options.steps:
                loss = run.train_step(text)
                bar.update()
                bar.set_postfix(loss=f"{loss:.4f}")
                if first and (run.step % options.print_every == 0 or run.step == options.steps):
                    print(f"step {run.step}: loss {loss:.4f} on {dist.get_world_size()} ranks", flush=True)
        run.save(folder)
    finally:
        dist.destroy_process_group()


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="number of processes, if not started by torchrun")
    parser.add_argument("--recipe", choices=["bf16", "nvidia", "nvidia_4over6", "unbiased"], default="nvidia")
    parser.add_argument("--size", choices=list(SHAPES), default="tiny")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--planned", type=int, default=400, help="steps of the full run, for the learning rate")
    parser.add_argument("--batch", type=int, default=16, help="windows per step, over all ranks")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--text", type=Path, default=Path(sysconfig.get_path("stdlib")), help="a folder of .py files")
    parser.add_argument("--limit", type=int, default=5_000_000, help="bytes of text to read (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("pretrain_fsdp_output"))
    parser.add_argument("--resume", action="store_true", help="resume from the checkpoint in --output")
    parser.add_argument("--print-every", type=int, default=10)
    parser.add_argument("--timeout", type=int, default=300, help="timeout of collectives in seconds")
    parser.add_argument("--cpu", action="store_true", help="use the CPU even if there are GPUs")
    options = parser.parse_args(arguments)
    world = int(os.environ.get("WORLD_SIZE", options.ranks))
    if options.batch % world:
        parser.error(f"--batch {options.batch} does not divide over {world} ranks")
    if options.resume and not (options.output / "checkpoint" / ".metadata").exists():
        parser.error(f"{options.output / 'checkpoint'} holds no checkpoint: leave out --resume")
    return options


if __name__ == "__main__":
    chosen = parse(sys.argv[1:])
    if "RANK" in os.environ:
        train(chosen)
    else:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        torchrun(["--standalone", "--nproc-per-node", str(chosen.ranks), __file__, *sys.argv[1:]])
