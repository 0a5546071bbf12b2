"""The Trainer of Hugging Face, with training steps by an Offbeat pipeline in two stages.

    python examples/huggingface_trainer.py [FILE]

`PipelineTrainer` keeps the loop of `transformers.Trainer`: data, logging, callbacks, evaluation and saving.
A step of the Trainer is one update of M gradients (`gradient_accumulation_steps` is M); optimizer, weight decay and
learning-rate schedule are those of the TrainingArguments, with one optimizer per stage. With `offbeat.BP()` the weights
are those of the plain Trainer, bit for bit, if dropout is 0.

Not supported: several processes (the Trainer would wrap the model in DistributedDataParallel; examples/huggingface.py
runs under torchrun), resuming from a checkpoint (it has the weights, without optimizers and batches in flight), the
norm of all gradients (`max_grad_norm` is that of each stage, and none is logged), and mixed precision of the Trainer
(use `precision=` of the pipeline).
Needs transformers and accelerate.
"""

from __future__ import annotations

import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, get_scheduler

import offbeat

LENGTH, PIECES, K, M = 32, 120, 2, 2


class PipelineTrainer(Trainer):
    """A Trainer whose model is trained in K stages."""

    def __init__(self, *given: Any, K: int, method: offbeat.Method, **options: Any) -> None:
        super().__init__(*given, **options)
        if self.args.world_size > 1:
            raise offbeat.UserError(f"{self.args.world_size} processes: the Trainer runs all stages in one")
        if self.args.gradient_accumulation_steps != method.M:
            raise offbeat.UserError(
                f"M={method.M} with gradient_accumulation_steps={self.args.gradient_accumulation_steps}: use the same"
            )
        self.K, self.method, self.args.save_only_model = K, method, True
        self.clip_norm, self.args.max_grad_norm = self.args.max_grad_norm or None, 0.0  # each stage clips its own

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Of no weight: stages have their own. The Trainer logs its learning rate, which is theirs."""
        self.optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=self.args.learning_rate)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        updates, warmup = num_training_steps, self.args.get_warmup_steps(num_training_steps)
        self.pipe = offbeat.Pipeline(  # without loss=: the model computes it from the labels
            self.model,
            K=self.K,
            method=self.method,
            optimizer=self.stage_optimizer,
            scheduler=lambda made: get_scheduler(self.args.lr_scheduler_type, made, warmup, updates),
            clip_norm=self.clip_norm,
        )
        return super().create_scheduler(num_training_steps, optimizer)

    def stage_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """The optimizer of the TrainingArguments, for the (name, parameter) pairs of one stage."""
        kind, settings = self.get_optimizer_cls_and_kwargs(self.args)
        pairs, decayed = list(parameters), self.get_decay_parameter_names(self.model)
        groups = [
            {"params": [p for name, p in pairs if name in decayed], "weight_decay": self.args.weight_decay},
            {"params": [p for name, p in pairs if name not in decayed], "weight_decay": 0.0},
        ]
        return kind([group for group in groups if group["params"]], **settings)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        loss = self.pipe.step(dict(inputs))
        return loss.detach() / self.method.M  # the Trainer adds those of an update

    def train(self, *given: Any, **options: Any) -> Any:
        self.model.zero_grad = lambda *_, **__: None  # gradients of a window that is not complete stay
        try:
            output = super().train(*given, **options)
        finally:
            del self.model.zero_grad
        self.pipe.drain()  # the batches in flight; then the model has the newest weights
        return output

    def _get_grad_norm(self, *_: Any, **__: Any) -> None:
        """None is logged: stages apply gradients of different batches."""

    def evaluate(self, *given: Any, **options: Any) -> dict[str, float]:
        found = super().evaluate(*given, **options)
        self.model.train()
        return found


def pieces() -> list[dict[str, Tensor]]:
    """Pieces of the given file, or of the source code of Offbeat, as arguments of the model; tokens are bytes."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(offbeat.__file__).parent / "pipeline/pipeline.py"
    text = path.read_bytes()
    found = [torch.tensor(list(text[n * LENGTH : (n + 1) * LENGTH])) for n in range(min(PIECES, len(text) // LENGTH))]
    return [{"input_ids": piece, "labels": piece} for piece in found]


def build() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def arguments(folder: str | Path, **changes: Any) -> TrainingArguments:
    settings = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": M,
        "num_train_epochs": 4,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "linear",
        "weight_decay": 0.1,
        "max_grad_norm": 0.0,
        "logging_steps": 5,
        "save_strategy": "epoch",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 0,
    }
    return TrainingArguments(output_dir=str(folder), **{**settings, **changes})


def main() -> None:
    if find_spec("accelerate") is None:
        sys.exit("this example needs accelerate: pip install accelerate")
    torch.set_num_threads(1)
    data = pieces()
    cut = len(data) * 9 // 10
    with tempfile.TemporaryDirectory() as folder:
        trainer = PipelineTrainer(
            build(),
            arguments(folder),
            train_dataset=data[:cut],
            eval_dataset=data[cut:],
            K=K,
            method=offbeat.ADL(M=M),
        )
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        print(f"held-out loss {before:.2f} before, {trainer.evaluate()['eval_loss']:.2f} after")
        print(f"mean staleness per stage in updates {[stage.mean for stage in trainer.pipe.staleness]}")
        trainer.save_model(f"{folder}/final")
        LlamaForCausalLM.from_pretrained(f"{folder}/final")  # an ordinary model of transformers
        print("saved:", *sorted(path.name for path in Path(folder).iterdir()))


if __name__ == "__main__":
    main()
