"""Count how often each operator runs."""

from torch.utils._python_dispatch import TorchDispatchMode


class Ops(TorchDispatchMode):
    """Counts the operators that run inside ``with``; ``ops["quantize"]`` is the count of ``nvfp4::quantize``."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket._qualified_op_name
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))

    def __getitem__(self, name):
        return self.counts.get(f"nvfp4::{name}", 0)

    @property
    def pairs(self):
        """Return how often a matrix was quantized together with its transpose."""
        whole = self["train_linear_forward"] + self["train_linear_backward"]
        return self["quantize_pair"] + self["quantize_pair_values"] + whole

    @property
    def products(self):
        """Return how many products were computed."""
        forwards = self["train_linear"] + self["train_linear_forward"]
        return self["matmul"] + forwards + 2 * self["train_linear_backward"]

    @property
    def weights(self):
        """Return how often a weight was quantized in a forward."""
        return self["quantize"] + self["train_linear"] + self["train_linear_forward"]
