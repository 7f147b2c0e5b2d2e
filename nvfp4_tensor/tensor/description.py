"""What tensors of codes and scales have in common: their size, their fields, and that they have no storage."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Sequence
from typing import Any, ClassVar, NoReturn, TypeAlias

from nvfp4_tensor._compat.source_digest import source_digest
from nvfp4_tensor._compat.torchao_import import quietly

with quietly():
    from torchao.utils import TorchAOBaseTensor

# The arguments (func, types, args, kwargs) with which torch calls an operator's implementation.
Op: TypeAlias = Any
Types: TypeAlias = Sequence[type]
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]

NOT_IN_SAFETENSORS = (
    "a safetensors file stores only plain tensors: use nvfp4_tensor.checkpoints.save(model, folder) for a checkpoint "
    "that servers load, nvfp4_tensor.integrations.transformers.attach_quantizer(model) before save_pretrained (for a "
    "model of diffusers, integrations.diffusers.attach_quantizer), "
    "accelerator.save_state(folder, safe_serialization=False) with accelerate, or "
    "torch.save(model.state_dict(), path) and model.load_state_dict(torch.load(path), assign=True)"
)


class CodedTensor(TorchAOBaseTensor):
    """A tensor of codes and scales. Subclasses name their inner tensors and other fields, as torchao's do."""

    tensor_data_names: ClassVar[list[str]]
    tensor_attribute_names: ClassVar[list[str]]
    optional_tensor_data_names: ClassVar[list[str]]

    @property
    def stored_bytes(self) -> int:
        """Number of bytes of the codes and scales, including padding."""
        parts = [getattr(self, name) for name in self.tensor_data_names]
        return sum(part.numel() * part.element_size() for part in parts)

    @property
    def bits_per_element(self) -> float:
        """Number of stored bits per element, padding not counted as elements."""
        return 8 * self.stored_bytes / max(self.numel(), 1)

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # torch's is a property too, of C
        """The same as :attr:`stored_bytes`."""
        return self.stored_bytes

    def element_size(self) -> float:  # type: ignore[override]
        """Return bytes per element as a fraction, so that ``element_size() * numel()`` is :attr:`stored_bytes`."""
        return self.stored_bytes / max(self.numel(), 1)

    def storage(self) -> NoReturn:  # type: ignore[override]
        """Raise a TypeError, because each inner tensor has its own storage. safetensors and transformers call it."""
        raise TypeError(NOT_IN_SAFETENSORS)

    def _fields(self, without: Container[str] = ()) -> dict[str, Any]:
        names = self.tensor_data_names + self.tensor_attribute_names + self.optional_tensor_data_names
        return {name: getattr(self, name) for name in names if name not in without}

    def _stable_hash_for_caching(self) -> str:
        """Return a hash of everything that a compiled graph may depend on, for torch's graph cache on disk."""
        names, fields = self.__tensor_flatten__()
        inner = [(name, t.shape, t.stride(), t.dtype, t.device) for name in names for t in (getattr(self, name),)]
        what = self.shape, self.requires_grad, inner, fields, source_digest()
        return hashlib.blake2b(repr(what).encode()).hexdigest()
