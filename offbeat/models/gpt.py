"""A GPT: a token embedding, pre-norm transformer blocks with rotary positions, a linear head over the vocabulary."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offbeat.errors import UserError

BASE = 10_000.0  # of the rotary frequencies
STD = 0.02  # of initial weights


class Attention(nn.Module):
    """Causal multi-head self-attention with rotary positions."""

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        frequencies = BASE ** -(torch.arange(0, width // heads, 2) / (width // heads))
        angles = torch.outer(torch.arange(context, dtype=torch.float32), frequencies)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # 3, b, heads, T, width / heads
        query, key, value = qkv.unbind(0)
        mixed = F.scaled_dot_product_attention(self._rotated(query), self._rotated(key), value, is_causal=True)
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return output

    def _rotated(self, x: Tensor) -> Tensor:
        """Each pair of features, turned by an angle that grows with its position."""
        length = x.shape[-2]
        cosine, sine = self.cosine[:length].to(x.dtype), self.sine[:length].to(x.dtype)  # type: ignore[index]
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, context)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            OrderedDict(up=nn.Linear(width, 4 * width), gelu=nn.GELU(), down=nn.Linear(4 * width, width))
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        output: Tensor = x + self.mlp(self.mlp_norm(x))
        return output


def gpt(
    vocabulary: int = 256, *, layers: int = 12, width: int = 256, heads: int = 4, context: int = 128
) -> nn.Sequential:
    """Logits (b, T, vocabulary) of the next token for tokens (b, T), T up to `context`; one unit per block.

    Weights start from a normal distribution of standard deviation 0.02; those that write into the residual stream from
    0.02 / sqrt(2 * layers), biases from 0. Embedding and head have weights of their own.

    >>> model = gpt(layers=2, width=16, heads=2, context=8)
    >>> [name for name, _ in model.named_children()]
    ['embedding', 'block0', 'block1', 'head']
    >>> model(torch.zeros(3, 8, dtype=torch.int64)).shape
    torch.Size([3, 8, 256])
    """
    for name, value in {
        "vocabulary": vocabulary,
        "layers": layers,
        "width": width,
        "heads": heads,
        "context": context,
    }.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"{name}={value!r} of a gpt: use a whole number from 1 up")
    if width % (2 * heads):
        raise UserError(f"width={width} with heads={heads} of a gpt: use a width that is a multiple of 2 * heads")
    units: OrderedDict[str, nn.Module] = OrderedDict(embedding=nn.Embedding(vocabulary, width))
    for layer in range(layers):
        units[f"block{layer}"] = Block(width, heads, context)
    units["head"] = nn.Sequential(
        OrderedDict(norm=nn.LayerNorm(width), linear=nn.Linear(width, vocabulary, bias=False))
    )
    for name, module in nn.Sequential(units).named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            residual = name.endswith(("attention.output", "mlp.down"))
            nn.init.normal_(module.weight, std=STD / (2 * layers) ** 0.5 if residual else STD)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    return nn.Sequential(units)
