"""A small GPT, traced and cut into three stages, trained on the characters of Shakespeare's plays.

    python examples/small_gpt.py                              # all stages in this process
    torchrun --nproc-per-node 3 examples/small_gpt.py         # one process per stage, the same results

The text is tinyshakespeare.txt (or .txt.xz) in the folder that OFFBEAT_DATA_DIR names, in data/ here, or in
../shared/data/packed. Without it, the source code of Offbeat is used instead, and a message is printed.
"""

from __future__ import annotations

import lzma
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import offbeat

CONTEXT, WIDTH, HEADS, BLOCKS = 64, 64, 4, 4
K, M, BATCH, BATCHES = 3, 2, 16, 100
HERE = Path(__file__).resolve().parents[1]


class Block(nn.Module):
    """Causal self-attention and a small network, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_network = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.queries_keys_values, self.joined = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.network = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:  # (b, T, width)
        b, T, width = x.shape
        split = self.queries_keys_values(self.before_attention(x)).view(b, T, 3, HEADS, width // HEADS)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)  # each (b, heads, T, width / heads)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.joined(seen.transpose(1, 2).reshape(b, T, width))
        return x + self.network(self.before_network(x))


class GPT(nn.Module):
    """Scores of the next character at every position.

    Many GPTs tie the output layer to the embedding (`self.scores.weight = self.embedding.weight`): GPT(..., tied=True).
    The first stage then trains the table, and sends it to the last one with every batch. Without tying, as here, the
    model has (characters x width) more parameters, and no table crosses the cuts.
    """

    def __init__(self, characters: int, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(characters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.last, self.scores = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters, bias=False)
        if tied:
            self.scores.weight = self.embedding.weight

    def forward(self, text: Tensor) -> Tensor:  # (b, T) -> (b, T, characters)
        x = self.embedding(text) + self.places(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        return self.scores(self.last(x))


def read_text() -> str:
    """Shakespeare's plays if they are found, else the source code of Offbeat."""
    places = [os.environ.get("OFFBEAT_DATA_DIR", ""), HERE / "data", HERE.parent / "shared/data/packed"]
    for place in (Path(place) for place in places if place):
        if (place / "tinyshakespeare.txt").is_file():
            return (place / "tinyshakespeare.txt").read_text()
        if (place / "tinyshakespeare.txt.xz").is_file():
            return lzma.decompress((place / "tinyshakespeare.txt.xz").read_bytes()).decode()
    print("no tinyshakespeare.txt in OFFBEAT_DATA_DIR: using the source code of Offbeat instead")
    sources = sorted(Path(offbeat.__file__).parent.rglob("*.py"))
    return "".join(path.read_text(encoding="utf-8") for path in sources)


def batch(text: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random pieces of the text, and the same pieces shifted by one character."""
    starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=generator).tolist()
    pieces = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
    return pieces[:, :-1], pieces[:, 1:]


def loss(scores: Tensor, following: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), following.flatten())


@torch.no_grad()
def write(model: nn.Module, begin: Tensor, length: int, generator: torch.Generator) -> Tensor:
    """Extend a text, one character at a time, sampled from the model."""
    text = begin
    for _ in range(length):
        scores = model(text[None, -CONTEXT:])[0, -1]
        text = torch.cat([text, torch.multinomial(scores.softmax(0), 1, generator=generator)])
    return text


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    text = read_text()
    alphabet = sorted(set(text))
    codes = {character: code for code, character in enumerate(alphabet)}
    learnt = torch.tensor([codes[character] for character in text])
    train, held_out = learnt[: len(learnt) * 9 // 10], learnt[len(learnt) * 9 // 10 :]
    generator = torch.Generator().manual_seed(0)
    test = [batch(held_out, generator) for _ in range(10)]

    pipe = offbeat.Pipeline(
        GPT(len(alphabet)),
        K=K,
        method=offbeat.ADL(M=M),
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        clip_norm=1.0,
        sample=test[0][0],  # to trace the model and cut it before the first batch
    )
    before = pipe.evaluate(test)["loss"]
    for _ in range(BATCHES):
        pipe.step(*batch(train, generator))
    model = pipe.drain().eval()  # the whole model with its newest weights, in every process
    after = pipe.evaluate(test)["loss"]
    if pipe.last:
        print(f"a GPT of {sum(p.numel() for p in model.parameters()):,} parameters, cut before units {pipe.cuts}")
        print(f"loss on held-out text: {before:.3f} before, {after:.3f} after {BATCHES} batches of {BATCH}")
        print("staleness per stage:", [stage.mean for stage in pipe.staleness])
        written = write(model, held_out[:CONTEXT], 120, torch.Generator().manual_seed(1))[CONTEXT:]
        print("sample:", repr("".join(alphabet[code] for code in written.tolist())))
    pipe.close()


if __name__ == "__main__":
    main()
