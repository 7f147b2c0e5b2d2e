"""What an NVFP4Tensor says about its size and its format."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from torch import Tensor

from nvfp4_tensor.numerics.choices import ProductBackend
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.tensor.windows import Unreadable, Window

NOT_IN_SAFETENSORS = (
    "a safetensors file stores only plain tensors: use nvfp4_tensor.checkpoints.save(model, folder) for a checkpoint "
    "that servers load, nvfp4_tensor.integrations.transformers.attach_quantizer(model) before save_pretrained (for a "
    "model of diffusers, integrations.diffusers.attach_quantizer), "
    "accelerator.save_state(folder, safe_serialization=False) with accelerate, or "
    "torch.save(model.state_dict(), path) and model.load_state_dict(torch.load(path), assign=True)"
)


if TYPE_CHECKING:
    from torchao.utils import TorchAOBaseTensor as _Base
else:
    _Base = object


class Described(_Base):
    """Sizes, a description and a repr, of the fields of :class:`~nvfp4_tensor.NVFP4Tensor`."""

    if TYPE_CHECKING:
        qdata: Tensor
        scale: Tensor
        per_tensor_scale: Tensor
        spec: QuantizeSpec
        activation_spec: QuantizeSpec | None
        activation_amax: Tensor | None
        product_backend: ProductBackend
        transposed: bool
        window: Window | Unreadable | None

    @property
    def stored_bytes(self) -> int:
        """Number of bytes of the codes, block scales (including padding) and per-tensor scale."""
        return sum(t.numel() * t.element_size() for t in (self.qdata, self.scale, self.per_tensor_scale))

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

    @property
    def optional_tensor_attribute_names(self) -> NoReturn:
        """Raise a TypeError: torchao's safetensors writer reads it and mistakes this class for its own of that name."""
        raise TypeError(NOT_IN_SAFETENSORS)

    def describe(self) -> str:
        """Return a description of the spec, the activation's spec (W4A4) and the bits per element."""
        static = ", static" if self.activation_amax is not None else ""
        backend = f", by {self.product_backend.name.lower()}" if self.product_backend != ProductBackend.AUTO else ""
        activation = f", activation ({self.activation_spec}{static}{backend})"
        if self.product_backend == ProductBackend.FP8:
            activation = ", activation (fp8)"
        elif self.activation_spec is None:
            activation = ""
        return f"{self.spec}{activation}, {self._bits()} bits/element"

    def _bits(self) -> str:
        if not isinstance(self.numel(), int) or isinstance(self.window, Unreadable):
            return "?"
        return f"{self.bits_per_element:.2f}"

    def __repr__(self, *, tensor_contents: object = None) -> str:
        grad = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"NVFP4Tensor(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"spec=({self.spec}){', transposed' if self.transposed else ''}"
            + (f", activation_spec=({self.activation_spec})" if self.activation_spec is not None else "")
            + f", {self._bits()} bits/element{grad})"
        )
