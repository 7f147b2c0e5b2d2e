"""torchtitan's own train.py on CPU ranks, by its own command line; what it takes from a GPU is stood in for here.

    PYTHONPATH=test torchrun --nproc-per-node 2 test/integrations/titan_on_cpu.py \\
        --module integrations.titan_llama --config debug_llama_on_cpu \\
        --override.imports 'nvfp4_tensor.integrations.torchtitan.nvfp4_linear={"recipe":"nvidia"}'
"""

import torch.distributed as dist
from integrations.titan_llama import use_cpu
from torch.distributed.fsdp import FSDPModule


def main() -> None:
    use_cpu()
    from torchtitan.train import Trainer
    from torchtitan.train import main as train_main

    train = Trainer.train

    def on_gloo(trainer):
        """Work around gloo, which has no scaled sum, and torch 2.13, which has no set_timeout."""
        for part in trainer.model_parts:
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)
        if not hasattr(dist, "set_timeout"):
            dist.set_timeout = lambda *args, **how: None
        return train(trainer)

    Trainer.train = on_gloo
    train_main()


if __name__ == "__main__":
    main()
