"""Small random models of transformers, each with a batch as people have it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

ROWS, LENGTH, WORDS = 3, 10, 40
SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": WORDS,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VISION = {**{key: SMALL[key] for key in list(SMALL)[:4]}, "image_size": 8, "patch_size": 4}
LABELS = {"num_labels": 3}
GPT2 = {"n_embd": 16, "n_layer": 4, "n_head": 2, "vocab_size": WORDS, "n_positions": 32}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 2, "loss_type": "ForCausalLM"}
OPT = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "ffn_dim": 24, "word_embed_proj_dim": 16}
DISTILBERT = {**LABELS, "dim": 16, "n_layers": 4, "n_heads": 2, "hidden_dim": 24, "vocab_size": WORDS}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4}
WHISPER = {"d_model": 16, "encoder_layers": 4, "encoder_attention_heads": 2, "encoder_ffn_dim": 24, "num_mel_bins": 8}
WHISPER |= {"max_source_positions": 6, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

CAUSAL = {  # model, configuration, its values
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**SMALL, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**SMALL, "num_key_value_heads": 1}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**SMALL, "num_key_value_heads": 1, "sliding_window": 6}),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", SMALL),
    "opt": ("OPTForCausalLM", "OPTConfig", {**SMALL, **OPT}),
    "bert with a language model head": ("BertForMaskedLM", "BertConfig", SMALL),
    "t5": ("T5ForConditionalGeneration", "T5Config", {**T5, "vocab_size": WORDS}),
}
CLASSIFYING = {
    "bert": ("BertForSequenceClassification", "BertConfig", {**SMALL, **LABELS}),
    "roberta": ("RobertaForSequenceClassification", "RobertaConfig", {**SMALL, **LABELS}),
    "distilbert": (
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        DISTILBERT,
    ),
}
SEEING = {
    "vit": ("ViTForImageClassification", "ViTConfig", {**VISION, **LABELS}),
    "swin": ("SwinForImageClassification", "SwinConfig", {**SWIN, **LABELS}),
    "clip": ("CLIPVisionModel", "CLIPVisionConfig", VISION),
}
SPEECH = {
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 12,
}
SPEECH |= {"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
SPEECH |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
UNCUT = {"layerdrop": 0.0, "apply_spec_augment": False}  # what prevents a cut by default, switched off
LISTENING = {
    "wav2vec2": ("Wav2Vec2ForCTC", "Wav2Vec2Config", {**SPEECH, **UNCUT}),
    "hubert": ("HubertModel", "HubertConfig", {**SPEECH, **UNCUT}),
    "wavlm": ("WavLMModel", "WavLMConfig", {**SPEECH, **UNCUT}),
}
NAMES = [*CAUSAL, *CLASSIFYING, *SEEING, "whisper"]
TIED = ["gpt2", "opt", "bert with a language model head", "t5"]


def build(name: str, **changed: Any) -> nn.Module:
    """The model, all of its weights random, in float32 (T5 in float64); `changed` values of its configuration."""
    import transformers

    torch.manual_seed(0)
    if name == "whisper":
        from transformers.models.whisper.modeling_whisper import WhisperEncoder

        model: nn.Module = WhisperEncoder(transformers.WhisperConfig(**WHISPER, vocab_size=WORDS))
    else:
        kind, config, values = {**CAUSAL, **CLASSIFYING, **SEEING, **LISTENING}[name]
        model = getattr(transformers, kind)(getattr(transformers, config)(**{**values, **changed}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model.double() if name == "t5" else model


def batch(name: str, rows: int = ROWS, *, length: int = LENGTH, padded: int = 0) -> dict[str, Tensor]:
    """Keyword arguments of forward; the last `padded` tokens of the first row are padding."""
    generator = torch.Generator().manual_seed(rows + 10 * length)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    if name == "whisper":
        return {"input_features": draw(rows, 8, 12)}
    if name in LISTENING:
        return {"input_values": draw(rows, 400)}
    classes = {"labels": torch.arange(rows) % 3}
    if name in SEEING:
        size: Any = {"swin": 16}.get(name, 8)
        return {"pixel_values": draw(rows, 3, size, size), **({} if name == "clip" else classes)}
    tokens = torch.randint(3, WORDS, (rows, length), generator=generator)
    mask = torch.ones_like(tokens)
    if padded:
        mask[0, -padded:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens if name in CAUSAL else classes["labels"]}
