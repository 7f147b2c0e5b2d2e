"""Memory of a model's tensors by kind."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

from torch import Tensor, nn

from nvfp4_tensor.numerics.layout import BLOCK


@dataclasses.dataclass(frozen=True)
class ModelSize:
    """Bytes of a model's parameters and buffers; ``str`` formats a summary.

    Attributes:
        codes: the codes of NVFP4 tensors, half a byte each.
        scales: their block scales, per-tensor scales and calibrated amaxes, including padding.
        dense: everything else, including quantized tensors of other libraries.
        unquantized: the total if each NVFP4 tensor were stored in its ``orig_dtype``.
        gradients: what training adds, not counted in the total: the gradients of all parameters that require one.
        moments: what training by :class:`training.NVFP4AdamW` adds: their moments, in four bits.
    """

    codes: int
    scales: int
    dense: int
    unquantized: int
    gradients: int = 0
    moments: int = 0

    @property
    def total(self) -> int:
        """The sum of codes, scales and dense."""
        return self.codes + self.scales + self.dense

    def __str__(self) -> str:
        text = (
            f"{_megabytes(self.total)}: codes {_megabytes(self.codes)}, scales {_megabytes(self.scales)}, "
            f"dense {_megabytes(self.dense)}"
        )
        if not self.codes:
            return text
        return f"{text}; {self.total / self.unquantized:.3f} of {_megabytes(self.unquantized)}"


def model_size(model: nn.Module) -> ModelSize:
    """Return the bytes of a model's parameters and buffers by kind, and what training adds. Shared ones count once.

    ``numel() * element_size()`` returns the stored bytes of an NVFP4 tensor too, but code that computes sizes from the
    dtype, such as accelerate's ``compute_module_sizes``, counts it as dense.

    Example::

        print(nvfp4_tensor.model_size(model))  # 148.1 MB: codes 53.1 MB, scales 6.6 MB, dense 88.4 MB; 0.493 of ...
    """
    seen: set[tuple] = set()
    sizes = {"codes": 0, "scales": 0, "dense": 0, "unquantized": 0}
    for tensor in (*model.parameters(), *model.buffers()):
        parts = [(kind, part) for kind, part in _parts(tensor) if not _is_counted(part, seen)]
        for kind, part in parts:
            sizes[kind] += part.nbytes
        if all(kind == "dense" for kind, _ in parts):
            sizes["unquantized"] += sum(part.nbytes for _, part in parts)
        else:
            sizes["unquantized"] += math.prod(tensor.shape) * tensor.dtype.itemsize
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = sum(math.prod(parameter.shape) * parameter.dtype.itemsize for parameter in trained)
    return ModelSize(**sizes, gradients=gradients, moments=sum(map(_moments, trained)))


def _moments(parameter: Tensor) -> int:
    """Return the bytes of NVFP4AdamW's moments: two codes and two bytes per block of 16, or two float32 if small."""
    rows, columns = len(parameter) if parameter.dim() else 1, math.prod(parameter.shape[1:])
    return rows * -(-columns // BLOCK) * (2 * BLOCK // 2 + 2) if columns >= BLOCK else 8 * rows * columns


def stored_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor, or of all inner tensors of a tensor subclass."""
    return sum(part.nbytes for _, part in _parts(tensor))


def bits_per_weight(model: nn.Module, filter_fn: Callable[[nn.Module, str], bool]) -> float:
    """Return stored bits per element, including padding, of the weights of the modules that ``filter_fn`` selects."""
    weights = [module.weight for name, module in model.named_modules() if filter_fn(module, name)]
    return 8 * sum(map(stored_bytes, weights)) / sum(weight.numel() for weight in weights)


def _parts(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the kind and data of each plain tensor in a tensor, through nested tensor subclasses."""
    names = getattr(tensor.data, "__tensor_flatten__", None)
    if names is None:
        yield "dense", tensor
        return
    from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor

    for name in names()[0]:
        for kind, part in _parts(getattr(tensor, name)):
            yield ("codes" if name == "qdata" else "scales") if isinstance(tensor, NVFP4Tensor) else kind, part


def _is_counted(part: Tensor, seen: set[tuple]) -> bool:
    """Return whether the memory of a tensor was counted before, and remember it."""
    key = part.untyped_storage()._cdata, part.storage_offset(), part.nbytes
    counted = key in seen
    seen.add(key)
    return counted


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
