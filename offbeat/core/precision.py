"""The precision in which a network computes; master weights, sums of gradients and optimizer are always float32.

    fp32   torch's own settings (where cuDNN's convolutions may use TF32 unless that is switched off)
    tf32   float32, multiplied with 10 bits of mantissa (CUDA)
    bf16   convolutions, products and what is between them in bfloat16

In bf16 each float32 parameter of two dimensions or more is used as a bfloat16 copy, one for each weight version. The
others (BatchNorm, biases) stay float32; autocast, which does nothing to the copies, casts them for operations that take
one type only. Losses are computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from offbeat.errors import UserError, unknown
from offbeat.tf32 import switch_tf32

Precision = Literal["fp32", "tf32", "bf16"]
LOW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class PrecisionPolicy:
    """A precision on a device; channels_last: whether images are in that memory format."""

    precision: Precision = "fp32"
    device: str = "cpu"  # its type
    channels_last: bool = False

    @classmethod
    def of(cls, precision: str, device: torch.device) -> PrecisionPolicy:
        """The policy of that name, if the device supports it.

        >>> PrecisionPolicy.of("bf16", torch.device("cpu")).lowers
        True
        """
        if precision not in get_args(Precision):
            raise unknown("precision", str(precision), get_args(Precision))
        if precision == "tf32" and device.type != "cuda":
            raise UserError(f"precision tf32 on {device.type}, which has no TF32: use fp32 or bf16, or device cuda")
        return cls(precision, device.type, wants_channels_last(precision, device))  # type: ignore[arg-type]

    @property
    def lowers(self) -> bool:
        """Whether forwards use copies of the parameters, in another type."""
        return self.precision == "bf16"

    def lowered(self, parameter: Tensor) -> bool:
        """Whether forwards use a copy of this parameter."""
        return self.lowers and parameter.dtype == torch.float32 and parameter.dim() >= 2

    def lower(self, value: Tensor) -> Tensor:
        """The value as forwards use it: a copy in another type, or itself."""
        return value.to(torch.bfloat16) if self.lowered(value) else value

    def version_bytes(self, parameters: Sequence[Tensor], whole: int) -> int:
        """Bytes of one weight version, where the parameters take `whole`."""
        return whole - sum(parameter.nbytes // 2 for parameter in parameters if self.lowered(parameter))

    def computing(self) -> AbstractContextManager[Any]:
        """Around a forward."""
        if not self.lowers:
            return nullcontext()
        return torch.autocast(self.device, dtype=torch.bfloat16, cache_enabled=False)

    def entering(self, content: Any) -> Any:
        """A batch as the first stage takes it: float32 becomes bfloat16, integers stay."""
        if not self.lowers and not self.channels_last:
            return content
        return pytree.tree_map_only(Tensor, self._entering, content)

    def _entering(self, tensor: Tensor) -> Tensor:
        laid = torch.channels_last if self.channels_last and tensor.dim() == 4 else torch.preserve_format
        low = self.lowers and tensor.dtype == torch.float32
        return tensor.to(dtype=torch.bfloat16 if low else tensor.dtype, memory_format=laid)

    def scoring(self, content: Any) -> Any:
        """An output as losses and metrics take it."""
        return pytree.tree_map_only(Tensor, raised, content) if self.lowers else content

    def in_full(self, loss: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
        """The loss, computed in float32 also inside a forward."""
        if not self.lowers:
            return loss

        def full(output: Any, target: Any) -> Tensor:
            with torch.autocast(self.device, enabled=False):
                return loss(self.scoring(output), target)

        return full

    def summable(self, gradients: list[Tensor | None], parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients for copies, as gradients of the parameters."""
        if not self.lowers:
            return gradients
        found = list(gradients)
        new, old = [], []
        for number, (gradient, parameter) in enumerate(zip(gradients, parameters, strict=True)):
            if gradient is not None and gradient.dtype != parameter.dtype:
                found[number] = term = torch.empty_like(gradient, dtype=parameter.dtype)
                new.append(term)
                old.append(gradient)
        if new:
            torch._foreach_copy_(new, old)  # on a GPU a single kernel
        return found

    def lay_out(self, model: nn.Module) -> None:
        """Put the model's images and filters into the memory format of this precision."""
        if self.channels_last:
            for tensor in (*model.parameters(), *model.buffers()):
                if tensor.dim() == 4:
                    tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)

    @contextmanager
    def switched(self) -> Iterator[None]:
        """Around a run: torch's switches for TF32."""
        if self.precision != "tf32":
            yield
            return
        try:
            before = switch_tf32("high", convolutions=True)
        except RuntimeError:
            raise UserError(
                "precision tf32 beside an fp32_precision of torch.backends that was set by hand: leave it "
                "alone, or use precision fp32, which takes it as it is"
            ) from None
        try:
            yield
        finally:
            switch_tf32(*before)


FULL = PrecisionPolicy()


def wants_channels_last(precision: str, device: torch.device) -> bool:
    """Whether images should be channels-last: where tensor cores multiply them.

    >>> wants_channels_last("bf16", torch.device("cuda")), wants_channels_last("bf16", torch.device("cpu"))
    (True, False)
    """
    return device.type == "cuda" and precision in ("tf32", "bf16")


def raised(tensor: Tensor) -> Tensor:
    """A tensor in float32, unless its type is at least as wide.

    >>> raised(torch.ones(1, dtype=torch.bfloat16)).dtype, raised(torch.ones(1, dtype=torch.float64)).dtype
    (torch.float32, torch.float64)
    """
    return tensor.float() if tensor.dtype in LOW else tensor
