"""Which parameters of a network are matrices of hidden layers, by their names and shapes."""

from __future__ import annotations

import re

from torch import Tensor

# Embeddings and output layers, by the parts of a dotted name: those of Offbeat, torchvision, timm and transformers.
NOT_HIDDEN = re.compile(
    r"""
    embed                                        # embedding, embed_tokens, patch_embed, position_embeddings
    | (^|\.) (wte|wpe|shared|relative_attention_bias|cls_token|mask_token|class_token) (\.|$)
    | (^|\.) (lm_head|heads?|classifier|score|qa_outputs|seq_relationship|output_projection) (\.|$)
    | (^|\.) predictions\.decoder (\.|$)         # BERT
    | ^ (module\.)? fc \.                        # the output layer of torchvision's ResNets; fc1 and c_fc are hidden
    """,
    re.VERBOSE,
)


def is_hidden_matrix(name: str | None, parameter: Tensor) -> bool:
    """Whether a parameter has at least two dimensions and no name of an embedding or an output layer.

    Names of output layers are lm_head, head, heads, classifier, score, qa_outputs, seq_relationship, output_projection,
    predictions.decoder and a top-level fc; names of embeddings contain embed or are wte, wpe, shared,
    relative_attention_bias, cls_token, class_token or mask_token. Without a name only the number of dimensions counts.

    >>> import torch
    >>> weight = torch.zeros(4, 4)
    >>> [is_hidden_matrix(name, weight) for name in ("h.0.mlp.c_fc.weight", "h.wte.weight", "head.weight", None)]
    [True, False, False, True]
    >>> is_hidden_matrix("h.0.mlp.c_fc.bias", torch.zeros(4))
    False
    """
    return parameter.ndim >= 2 and not (name and NOT_HIDDEN.search(name))
