"""Causal language models of transformers: hf:config.json with new weights, or hf:FOLDER with those in the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.errors import UserError, first_line, require
from offbeat.models.spec import NetworkSpec, Shape

CONTEXT = 128  # tokens of a sample, by default
WEIGHTS = ("*.safetensors", "*.bin")


class NextTokenLogits(nn.Module):
    """Put before the class of a model: logits (b, T, vocabulary) for tokens (b, T), without a cache.

    A module around the model would change the names of its parameters.
    """

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = super().forward(input_ids=tokens, use_cache=False).logits
        return logits


def spec(text: str) -> NetworkSpec:
    """Of the model in a local folder or config.json; nothing is downloaded."""
    path = Path(text).expanduser()
    if not text or not path.exists():
        raise UserError(f"model 'hf:{text}': there is no such file or folder, give a config.json or a folder with one")
    require(["transformers"], f"model 'hf:{text}' needs")
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(path), local_files_only=True)
        vocabulary = int(config.vocab_size)
    except Exception as error:  # transformers raises all kinds
        raise _unusable(text, error) from error
    longest = getattr(config, "max_position_embeddings", None)
    context = min(CONTEXT, longest) if longest else CONTEXT

    def make(shape: Shape, classes: int) -> nn.Module:
        if vocabulary < classes:
            raise UserError(
                f"model 'hf:{text}' has a vocabulary of {vocabulary} tokens, but the data has {classes}: use the "
                "model's own tokenizer="
            )
        model = _built(text, path, config)
        model.__class__ = type(type(model).__name__, (NextTokenLogits, type(model)), {})
        return model

    return NetworkSpec(make, (context,), vocabulary, longest=longest, ours=False)


def _built(text: str, path: Path, config: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    has_weights = path.is_dir() and any(True for kind in WEIGHTS for _ in path.glob(kind))
    try:
        if has_weights:
            kept: nn.Module = AutoModelForCausalLM.from_pretrained(
                str(path), local_files_only=True, dtype=torch.float32
            )
            return kept.train()
        made: nn.Module = AutoModelForCausalLM.from_config(config)
        return made.train()
    except Exception as error:  # transformers raises all kinds
        raise _unusable(text, error) from error


def _unusable(text: str, error: Exception) -> UserError:
    return UserError(
        f"model 'hf:{text}' is not a causal language model that transformers can build ({first_line(error)}): give a "
        "config.json, or a folder as save_pretrained writes it"
    )
