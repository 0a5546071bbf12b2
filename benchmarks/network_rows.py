"""The rows and networks of benchmarks/network.py; pure data. All rows have the same samples per update."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

SAMPLES, M = 32, 4  # of an update; batches into which late methods split it
INNER_STEPS = 50  # of local SGD, between two averages of the weights


@dataclass(frozen=True)
class Network:
    """A network to train; `shape` of a sample."""

    name: str
    model: str
    shape: tuple[int, ...]
    classes: int

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "shape": list(self.shape)}

    @classmethod
    def of(cls, stored: dict[str, Any]) -> Network:
        return cls(**{**stored, "shape": tuple(stored["shape"])})


MEASURED = (
    Network("gpt", "gpt:layers=12,width=256,heads=4,context=64", (64,), 256),  # 9.6 million parameters
    Network("resnet50", "resnet50", (3, 32, 32), 100),
)
TINY = Network("tiny", "gpt:layers=2,width=32,heads=2,context=8", (8,), 16)  # to try the benchmark itself


@dataclass(frozen=True)
class NetworkRow:
    """One way to train.

    kind       ddp, local-sgd, torch (a schedule of torch.distributed.pipelining) or ours (a method of this package)
    setting    the schedule, or the method
    parts      micro-batches of an update, or batches of late methods
    family     rows that differ in `parts` alone have the same; tables show the fastest of them
    late       whether gradients are stale
    """

    name: str
    title: str
    kind: str
    setting: str = ""
    parts: int = 1
    messages: str = "exact"
    family: str = ""
    late: bool = False


def _split(name: str, title: str, kind: str, setting: str) -> list[NetworkRow]:
    return [NetworkRow(f"{name}-{m}", f"{title}, {m} micro-batches", kind, setting, m, family=name) for m in (M, 2 * M)]


LISTED = (
    NetworkRow("ddp", "DDP", "ddp"),
    NetworkRow("ddp-accumulate", f"DDP, {M} accumulated batches", "ddp", parts=M),
    NetworkRow("local-sgd", f"DDP, local SGD ({INNER_STEPS} inner steps)", "local-sgd"),
    *_split("torch-gpipe", "torch pipelining, GPipe", "torch", "ScheduleGPipe"),
    *_split("torch-1f1b", "torch pipelining, 1F1B", "torch", "Schedule1F1B"),
    *_split("gpipe", "Offbeat GPipe", "ours", "gpipe"),
    NetworkRow("adl", "Offbeat ADL", "ours", "adl", M, late=True),
    NetworkRow("adl-bf16", "Offbeat ADL, bf16 messages", "ours", "adl", M, messages="bf16", late=True),
    NetworkRow("adl-int8", "Offbeat ADL, int8 messages", "ours", "adl", M, messages="int8", late=True),
    NetworkRow("adl-1f1b", "Offbeat ADL on the 1F1B lag", "ours", "adl-1f1b", M, late=True),
    NetworkRow("2bw", "Offbeat 2BW", "ours", "2bw", M, late=True),
)
ROWS = {row.name: row for row in LISTED}
