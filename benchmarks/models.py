"""Cut many models of other libraries; record how they were traced, how well they balance and whether they are exact.

    python benchmarks/models.py [--K 4] [--device cuda] [--only NAME ...] [--out FILE]

Models of timm, torchvision and transformers, with random weights: a library that is not installed is left out. Each is
cut by measured time; next to the balance of these cuts are the best balance that any cuts between the same units could
reach by the same times, and the balance that the largest unit permits. It is exact if the output, the loss and every
gradient through the stages are those of the unsplit model, bit for bit, in training mode with one stream of random
numbers; otherwise the largest difference is recorded, relative to the largest element. A gradient that is zero but for
rounding (a bias of keys before a softmax) is compared with the rounding error of the largest gradient instead. On a GPU
deterministic kernels are asked for; `repeated` is the difference between two runs of the unsplit model, by the same
rule.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from start import origin, write_record
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import offbeat
from offbeat.core.layout import as_leaf
from offbeat.errors import UserError, first_line
from offbeat.partitioning import Partition
from offbeat.partitioning.copies import copy_model
from offbeat.partitioning.inputs import Inputs
from offbeat.partitioning.sample_trace import without_caches
from offbeat.partitioning.solve import solve
from offbeat.runs.provenance import provenance

TORCHVISION = [
    "alexnet",
    "convnext_tiny",
    "densenet121",
    "efficientnet_b0",
    "efficientnet_v2_s",
    "maxvit_t",
    "mnasnet1_0",
    "mobilenet_v2",
    "mobilenet_v3_large",
    "regnet_y_400mf",
    "resnet18",
    "resnet50",
    "resnext50_32x4d",
    "shufflenet_v2_x1_0",
    "squeezenet1_1",
    "swin_t",
    "swin_v2_t",
    "vgg16_bn",
    "vit_b_16",
    "wide_resnet50_2",
]
TIMM = [
    "beit_base_patch16_224",
    "convnext_tiny",
    "deit_small_patch16_224",
    "densenet121",
    "efficientnet_b0",
    "ghostnet_100",
    "mixer_s16_224",
    "mobilenetv3_large_100",
    "nf_resnet50",
    "poolformer_s12",
    "regnetx_002",
    "resmlp_12_224",
    "resnet50",
    "resnetv2_50",
    "swin_tiny_patch4_window7_224",
    "tf_efficientnetv2_s",
    "vit_small_patch16_224",
    "xcit_nano_12_p16_224",
]
TEXT = {"hidden_size": 256, "num_hidden_layers": 12, "num_attention_heads": 4, "intermediate_size": 1024}
TEXT |= {"vocab_size": 8192, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
IMAGE = {key: TEXT[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")}
GPT2 = {"n_embd": 256, "n_layer": 12, "n_head": 4, "vocab_size": 8192, "n_positions": 512, "loss_type": "ForCausalLM"}
DISTILBERT = {"dim": 256, "n_layers": 6, "n_heads": 4, "hidden_dim": 1024, "vocab_size": 8192}
T5 = {"d_model": 256, "d_kv": 64, "d_ff": 1024, "num_layers": 6, "num_heads": 4, "vocab_size": 8192}
WHISPER = {"d_model": 256, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 4}
WHISPER |= {"decoder_attention_heads": 4, "decoder_start_token_id": 1, "pad_token_id": 0, "vocab_size": 8192}
TRANSFORMERS: dict[str, tuple[str, dict[str, Any], str]] = {  # model: configuration, its values, kind of batch
    "GPT2LMHeadModel": ("GPT2Config", GPT2, "text"),
    "LlamaForCausalLM": ("LlamaConfig", {**TEXT, "num_key_value_heads": 2}, "text"),
    "Qwen2ForCausalLM": ("Qwen2Config", {**TEXT, "num_key_value_heads": 2}, "text"),
    "MistralForCausalLM": ("MistralConfig", {**TEXT, "num_key_value_heads": 2}, "text"),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", TEXT, "text"),
    "OPTForCausalLM": ("OPTConfig", {**TEXT, "ffn_dim": 1024, "word_embed_proj_dim": 256}, "text"),
    "BertForMaskedLM": ("BertConfig", TEXT, "text"),
    "BertForSequenceClassification": ("BertConfig", TEXT, "classes"),
    "RobertaForSequenceClassification": ("RobertaConfig", TEXT, "classes"),
    "DistilBertForSequenceClassification": ("DistilBertConfig", DISTILBERT, "classes"),
    "T5ForConditionalGeneration": ("T5Config", {**T5, "decoder_start_token_id": 0}, "text"),
    "ViTForImageClassification": ("ViTConfig", IMAGE, "image"),
    "SwinForImageClassification": ("SwinConfig", {"embed_dim": 48}, "image"),
    "CLIPVisionModel": ("CLIPVisionConfig", IMAGE, "vision"),
    "WhisperModel": ("WhisperConfig", WHISPER, "audio"),
}
ROWS, WIDTH, LENGTH, CLASSES = 8, 224, 128, 10
Build = Callable[[], tuple[nn.Module, Any]]


def cases(device: torch.device) -> Iterator[tuple[str, str, Build]]:
    """Library, name, and a function that makes the model and a batch."""
    if find_spec("torchvision"):
        for name in TORCHVISION:
            yield "torchvision", name, lambda name=name: (_torchvision(name), _images(device))
    if find_spec("timm"):
        for name in TIMM:
            yield "timm", name, lambda name=name: (_timm(name), _images(device))
    if find_spec("transformers"):
        for name in TRANSFORMERS:
            yield "transformers", name, lambda name=name: _transformers(name, device)


def _torchvision(name: str) -> nn.Module:
    import torchvision

    made: nn.Module = torchvision.models.get_model(name, num_classes=CLASSES)
    return made


def _timm(name: str) -> nn.Module:
    import timm

    made: nn.Module = timm.create_model(name, pretrained=False, num_classes=CLASSES)
    return made


def _images(device: torch.device) -> Tensor:
    return torch.randn(ROWS, 3, WIDTH, WIDTH, device=device)


def _transformers(name: str, device: torch.device) -> tuple[nn.Module, dict[str, Tensor]]:
    import transformers

    config, values, kind = TRANSFORMERS[name]
    model = getattr(transformers, name)(getattr(transformers, config)(**values))
    labels = torch.zeros(ROWS, dtype=torch.long, device=device)
    if kind in ("image", "vision"):
        return model, {"pixel_values": _images(device), **({"labels": labels} if kind == "image" else {})}
    tokens = torch.randint(3, 8192, (ROWS, LENGTH), device=device)
    if kind == "audio":
        return model, {"input_features": torch.randn(ROWS, 80, 3000, device=device), "decoder_input_ids": tokens}
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    return model, {**batch, "labels": tokens if kind == "text" else labels}


def measured(library: str, name: str, build: Build, K: int, device: torch.device) -> dict[str, Any]:
    """One model: how it was traced and cut, and whether it is exact."""
    found: dict[str, Any] = {"library": library, "model": name}
    try:
        torch.manual_seed(0)
        model, x = build()
        model.to(device).train()
        found |= {"parameters": sum(p.numel() for p in model.parameters()), "modules": sum(1 for _ in model.modules())}
        began = time.perf_counter()
        counted = offbeat.partition(model, K, x)
        found["seconds"] = time.perf_counter() - began
        made = offbeat.partition(model, K, x, by="measured")
        found |= {"trace": made.trace, "units": len(made.names), "balance_by_flops": counted.balance}
        found |= {"balance": made.balance, "cuts": made.cuts, "ties": len(made.ties), "notes": made.notes}
        found |= limits(made)
        found["stages"] = [[made.names[a], made.names[b - 1]] for a, b in _spans(made)]
        found |= differences(model, made, x)
    except (UserError, RuntimeError, ValueError, TypeError, AttributeError, ImportError, KeyError) as error:
        found["failed"] = f"{type(error).__name__}: {first_line(error)}"
    return found


def limits(made: Partition) -> dict[str, float]:
    """The best balance of any legal cuts by the times of these units, and what the largest unit alone permits."""
    best = solve(made.unit_costs, made.K, legal=made.legal)
    return {"best_balance": best.balance, "largest_unit_permits": best.balance_bound}


def _spans(made: Partition) -> list[tuple[int, int]]:
    return list(zip([0, *made.cuts], [*made.cuts, len(made.names)], strict=True))


def differences(model: nn.Module, made: Partition, x: Any) -> dict[str, float]:
    """How far the stages are from the unsplit model, and the unsplit model from itself when it is run again."""
    inputs = Inputs.of(model, x)

    def unsplit() -> list[Tensor]:
        whole = copy_model(model)
        without_caches(whole)
        torch.manual_seed(1)
        outputs = _differentiable(inputs.call(whole, inputs.values(x)))
        torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
        return [*outputs, *_gradients(whole)]

    expected, again = unsplit(), unsplit()
    torch.manual_seed(1)
    there = [*through(made.stages, x), *_gradients(model)]
    return {"difference": _difference(expected, there), "repeated": _difference(expected, again)}


def _gradients(model: nn.Module) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


def _difference(expected: list[Tensor], found: list[Tensor]) -> float:
    """The largest difference, relative to the largest element of each tensor; 0 is bit for bit."""
    largest = [float(t.detach().abs().max()) for t in expected]
    rounding = max(largest) * torch.finfo(torch.float32).eps
    return max(
        float((a - b).detach().abs().max()) / max(scale, rounding)
        for a, b, scale in zip(expected, found, largest, strict=True)
    )


def through(stages: list[nn.Module], x: Any) -> list[Tensor]:
    """Forward and backward through the stages, with nothing between them but detached messages and gradients."""
    tape: list[tuple[list[Tensor], list[Tensor]]] = []
    value = x
    for k, stage in enumerate(stages):
        if k:
            value = pytree.tree_map_only(Tensor, as_leaf, value)
        leaves = [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]
        value = stage(value)
        tape.append((leaves, [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]))
    final = _differentiable(tape[-1][1])
    incoming: list[Tensor | None] = [torch.ones_like(t) if t.requires_grad else None for t in tape[-1][1]]
    for leaves, outputs in reversed(tape):
        pairs = [(t, g) for t, g in zip(outputs, incoming, strict=True) if g is not None and t.requires_grad]
        if pairs:
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        incoming = [t.grad for t in leaves]
    return final


def _differentiable(content: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(content) if isinstance(t, Tensor) and t.requires_grad]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--K", type=int, default=4)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="*", default=[], help="names of models or libraries")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    warnings.simplefilter("ignore")
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    made = provenance(origin()["command"], device=options.device)
    rows = []
    for library, name, build in cases(device):
        if options.only and not {library, name} & set(options.only):
            continue
        row = measured(library, name, build, options.K, device)
        rows.append(row)
        summary = row.get("failed") or (
            f"{row['trace']}, {row['units']} units, {row['seconds']:.1f} s, balance {row['balance']:.3f} measured "
            f"(best {row['best_balance']:.3f}, largest unit permits {row['largest_unit_permits']:.3f}), "
            f"{row['balance_by_flops']:.3f} by FLOPs, difference {row['difference']:.2g} "
            f"(repeated {row['repeated']:.2g})"
        )
        print(f"{library} {name}: {summary}", flush=True)
        settings = {"K": options.K, "device": str(device), "batch_size": ROWS, "pixels": WIDTH, "tokens": LENGTH}
        write_record(options.out, {"provenance": made, "settings": settings, "models": rows})
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
