"""Fine-tune a small causal language model of Hugging Face on a text file, in two stages.

    python examples/huggingface.py [FILE]                          # both stages in this process
    torchrun --nproc-per-node 2 examples/huggingface.py [FILE]     # one process per stage, the same results

The model is a small Llama with random weights and the tokens are bytes, so that nothing is downloaded; to fine-tune a
model of yours, load it with `AutoModelForCausalLM.from_pretrained(folder)` and the tokens with its tokenizer. Without
FILE, the text is the source code of Offbeat. Needs transformers.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import offbeat

LENGTH, BATCH, EPOCHS, K, M = 64, 8, 3, 2, 2
PIECES = 400  # of the text, of LENGTH bytes each


def read_text() -> bytes:
    """The given file, or the source code of Offbeat."""
    if len(sys.argv) > 1:
        return Path(sys.argv[1]).read_bytes()
    return b"".join(path.read_bytes() for path in sorted(Path(offbeat.__file__).parent.rglob("*.py")))


def pieces(text: bytes) -> list[dict[str, Tensor]]:
    """Pieces of the text as keyword arguments of the model; it shifts the labels by one token itself."""
    found = [torch.tensor(list(text[n * LENGTH : (n + 1) * LENGTH])) for n in range(min(PIECES, len(text) // LENGTH))]
    return [{"input_ids": piece, "attention_mask": torch.ones_like(piece), "labels": piece} for piece in found]


def build() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = pieces(read_text())
    train = DataLoader(data[: len(data) * 9 // 10], batch_size=BATCH, shuffle=True)
    test = DataLoader(data[len(data) * 9 // 10 :], batch_size=BATCH)
    model = build()
    pipe = offbeat.Pipeline(  # without loss=: the model computes it from the labels
        model,
        K=K,
        method=offbeat.ADL(M=M),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        clip_norm=1.0,
    )
    before = pipe.evaluate(test)["loss"]
    pipe.fit(train, epochs=EPOCHS)  # drains at the end: then `model` has the newest weights, in every process
    after = pipe.evaluate(test)["loss"]
    if pipe.last:
        print(f"{sum(p.numel() for p in model.parameters()):,} parameters, cut before units {pipe.cuts}")
        print(f"perplexity per byte of held-out text: {math.exp(before):.1f} before, {math.exp(after):.1f} after")
        prompt = torch.tensor([list(b"def ")])
        mask = torch.ones_like(prompt)
        torch.manual_seed(1)
        written = model.eval().generate(prompt, attention_mask=mask, max_new_tokens=40, do_sample=True)
        print("generated:", repr(bytes(written[0].tolist()).decode(errors="replace")))
    pipe.close()


if __name__ == "__main__":
    main()
