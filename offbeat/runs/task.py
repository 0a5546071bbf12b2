"""What a run is about, by its data: classes of images, or the next token of a text. Without torch.

It determines what an evaluation is called and how it is printed, the unit of speed, and defaults of recipes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class LearningTask:
    """A kind of training.

    metric      the result of an evaluation, in words; lower is better
    heading     the same, short, as the heading of a column
    key         its name in the records: `key` in the result, `test_key` and `train_key` after an epoch
    digits      of the metric after the point
    percent     whether it is a percentage
    unit        what speed counts
    defaults    of recipes, by setting
    warmup_share   of the epochs, by default; None where `defaults` has a number of epochs
    """

    name: str
    metric: str
    heading: str
    key: str
    digits: int
    percent: bool
    unit: str
    defaults: Mapping[str, Any]
    warmup_share: float | None = None

    @property
    def axis(self) -> str:
        """The metric as the title of an axis."""
        return f"{self.metric}, %" if self.percent else self.metric

    @property
    def speed_key(self) -> str:
        """The name of the speed in the records."""
        return f"{self.unit}_per_second"

    @property
    def speed_unit(self) -> str:
        return f"{self.unit}/s"

    def shown(self, value: float, *, space: str = "") -> str:
        """The metric as text, with its unit."""
        return f"{value:.{self.digits}f}{f'{space}%' if self.percent else ''}"

    def cell(self, value: float) -> str:
        """The metric as text, in a column with its heading."""
        return f"{value:.{self.digits}f}"

    def speed(self, record: Mapping[str, Any]) -> Any:
        """The speed in a line of the records, in the unit of the task."""
        return record.get(self.speed_key, record.get("samples_per_second"))

    def per_sample(self, shape: tuple[int, ...]) -> int:
        """What speed counts, per sample of this shape."""
        return shape[0] if self.unit == "tokens" else 1

    def evaluated(self, test: Mapping[str, Any], bytes_per_token: float | None) -> dict[str, Any]:
        """Results of an evaluation, under their names in the records."""
        if bytes_per_token is None:
            return {name: test[name] for name in ("loss", "error", "top5")}
        return {
            "loss": test["loss"],
            "error": None,
            "top5": None,
            self.key: bits_per_byte(test["loss"], bytes_per_token),
        }


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """A cross-entropy in nats per token, in bits per byte of the text.

    >>> round(bits_per_byte(math.log(256), 1.0), 6), round(bits_per_byte(math.log(256), 4.0), 6)
    (8.0, 2.0)
    """
    return loss / math.log(2) / bytes_per_token


CLASSIFICATION = LearningTask(
    name="classification",
    metric="test error",
    heading="error %",
    key="error",
    digits=2,
    percent=True,
    unit="samples",
    defaults={
        "optimizer": "sgd",
        "epochs": 300,
        "warmup": 3.0,
        "schedule": "steps",
        "milestones": (1 / 2, 3 / 4, 11 / 12),
    },
)
LANGUAGE = LearningTask(
    name="language",
    metric="bits per byte",
    heading="bits per byte",
    key="bits_per_byte",
    digits=3,
    percent=False,
    unit="tokens",
    defaults={
        "optimizer": "adamw",
        "epochs": 1,
        "schedule": "cosine",
        "milestones": (0.8, 0.95),  # of steps
    },
    warmup_share=0.05,  # 75 of 1,500 updates
)
TASKS = (CLASSIFICATION, LANGUAGE)
DATA = {"text": LANGUAGE}  # all other data sets are images
TOKEN_MODELS = ("gpt", "hf")  # that take tokens: the part of their names before the colon


def task_of(data: str) -> LearningTask:
    """The task of a data set, by its name."""
    return DATA.get(data, CLASSIFICATION)


def task_named(name: str) -> LearningTask:
    return next(task for task in TASKS if task.name == name)


def task_of_result(result: Mapping[str, Any]) -> LearningTask:
    """The task of a run, by its result."""
    return LANGUAGE if LANGUAGE.key in result else CLASSIFICATION


def default_names(model: str | None, data: str | None) -> tuple[str, str]:
    """Model and data of a recipe where one or both are not given.

    >>> default_names(None, None), default_names("gpt:layers=2", None), default_names(None, "text")
    (('resnet56', 'cifar10'), ('gpt:layers=2', 'text'), ('gpt', 'text'))
    """
    if data is None:
        data = "text" if model is not None and model.partition(":")[0] in TOKEN_MODELS else "cifar10"
    if model is None:
        model = "gpt" if task_of(data) is LANGUAGE else "resnet56"
    return model, data
