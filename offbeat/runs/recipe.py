"""The recipe of a run: everything that decides its numbers, with the paper's settings as defaults."""

from __future__ import annotations

import json
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from offbeat.errors import UserError, first_line, unknown
from offbeat.method import Method, Weights
from offbeat.methods import settings_of, with_settings
from offbeat.ops import WindowRule
from offbeat.runs.epochs import Epochs
from offbeat.timeline import MOST_TURNS

ENGINES = ("simulate", "processes", "streams")
MOST = 2**31  # for whole numbers
RESOLVED = ("M", "weights", "window")  # settings that every recipe states, as its method has them
# Settings that were fields of their own in recipes of earlier versions, None where they were not given.
EARLIER = ("M", "weights", "window", "corrector", "m", "beta", "N", "recompute", "barrier", "conditional", "buffer")
PAPER: dict[str, Any] = {
    "model": "resnet56",
    "data": "cifar10",
    "method": "adl",
    "K": 1,
    "batch_size": 32,
    "momentum": 0.9,
    "warmup": 3.0,
    "seed": 0,
}
WARMUP_START = 0.01  # the released code ramps up from 1 % of the learning rate


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training run, complete; `complete` fills in what the user left open.

    `settings` are the method's: M, weights and window as it has them, the others where they were given. It refuses
    those that it does not take.
    """

    model: str
    data: str
    data_dir: str | None = None
    shape: tuple[int, ...] | None = None
    classes: int | None = None
    samples: int | None = None
    data_workers: int | None = None  # None: as many as there are cores, up to 8
    method: str
    settings: dict[str, Any] = field(hash=False)
    K: int
    engine: str
    device: Literal["cpu", "cuda"] = "cpu"
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    compile: bool = False
    fuse: bool = False
    tune: bool = False
    cuts: tuple[int, ...] | None = None
    units: Literal["blocks", "layers"] | None = None
    partition: Literal["flops", "measured"] = "flops"
    speeds: tuple[float, ...] | None = None
    epochs: int
    batch_size: int
    drop_last: bool = False  # leave out the short last batch of an epoch
    weighting: Literal["batches", "samples"] = "batches"  # in the mean of a window
    lr: float
    momentum: float
    weight_decay: float
    warmup: float
    milestones: tuple[float, ...]
    clip_norm: float | None = None
    seed: int
    threads_per_stage: int
    checkpoint_every: str | None = None
    checkpoint_mode: Literal["in-flight", "drained"] = "in-flight"
    keep: int = 3
    on_nan: Literal["stop", "skip", "rollback"] = "stop"
    left_out: tuple[int, ...] | None = None  # batches whose gradients are not used
    trace: int | None = None  # local iterations to record, which changes no number
    diagnose: int | None = None  # updates between two looks at late gradients, nor does this

    @property
    def M(self) -> int:  # noqa: N802
        return int(self.settings["M"])

    @property
    def weights(self) -> Weights:
        found: Weights = self.settings["weights"]
        return found

    @property
    def window(self) -> WindowRule:
        found: WindowRule = self.settings["window"]
        return found

    @property
    def corrector(self) -> str | None:
        return self.settings.get("corrector")

    def make_method(self) -> Method:
        return with_settings(self.method, self.settings)

    def count(self, samples: int) -> Epochs:
        """The epochs of a run of this recipe from its beginning, where one has so many samples."""
        return Epochs(samples=samples, batch_size=self.batch_size, drop_last=self.drop_last)

    def learning_rate(self, counted: Epochs) -> Callable[[int], float]:
        """Factor of lr for update s, which is that of batch M*s: a ramp, then a tenth at each milestone.

        >>> recipe = complete(M=2, epochs=4, warmup=1.0, milestones=(0.5, 0.75), batch_size=8)
        >>> factor = recipe.learning_rate(recipe.count(samples=80))
        >>> [round(factor(s), 4) for s in (0, 4, 5, 9, 10, 15)]
        [0.01, 0.802, 1.0, 1.0, 0.1, 0.01]
        """
        M, ramp = self.M, self.warmup * counted.per_epoch
        drops = [fraction * self.epochs * counted.per_epoch for fraction in self.milestones]

        def factor(s: int) -> float:
            batch = counted.progress(M * s)
            if batch < ramp:
                return WARMUP_START + (1 - WARMUP_START) * batch / ramp
            return 0.1 ** bisect_right(drops, batch)

        return factor

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def linear_rate(batch_size: int, M: int) -> float:
    """The paper's learning rate: it grows with the samples of an update."""
    return 0.1 * batch_size * M / 256


def cores() -> int:
    """Processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def complete(**given: Any) -> Recipe:
    """The recipe with these values and the paper's for all others; None is the same as leaving one out.

    Names that are no field of a recipe are settings of the method; one that shares its name with a field goes in
    `settings`.

    lr is 0.1 * batch_size * M / 256; CIFAR-like data takes 300 epochs, weight decay 5e-4 and a tenth of the rate at
    1/2, 3/4 and 11/12 of them; image folders 90 epochs, 1e-4 and 1/3, 2/3, 8/9.

    >>> recipe = complete(method="adl", K=4, M=4)
    >>> recipe.lr, recipe.epochs, recipe.engine
    (0.05, 300, 'processes')
    >>> complete(method="dni", lr=0.1, settings={"lr": 1e-4}).settings
    {'M': 1, 'weights': 'stash', 'window': 'count', 'lr': 0.0001}
    """
    values = {**PAPER, **{name: value for name, value in given.items() if value is not None}}
    names = {field.name for field in fields(Recipe)}
    given = {**values.pop("settings", {}), **{name: values.pop(name) for name in list(values) if name not in names}}
    _check(values)
    method = with_settings(values["method"], given)
    taken = sorted(given.keys() & settings_of(values["method"]).keys() - set(RESOLVED))
    for corrector in method.correctors:
        if corrector.reads_momentum and not 0 < values["momentum"] < 1:
            raise UserError(
                f"corrector {corrector.name} with momentum = {values['momentum']:g}: it reads the momentum "
                "of SGD, use one between 0 and 1"
            )
    image_folder = values["data"] == "imagefolder"
    defaults = {
        "settings": {name: getattr(method, name) for name in RESOLVED} | {name: given[name] for name in taken},
        "engine": _engine(values, method),
        "epochs": 90 if image_folder else 300,
        "lr": linear_rate(values["batch_size"], method.M),
        "weight_decay": 1e-4 if image_folder else 5e-4,
        "milestones": (1 / 3, 2 / 3, 8 / 9) if image_folder else (1 / 2, 3 / 4, 11 / 12),
        "threads_per_stage": max(1, cores() // values["K"]),
    }
    return Recipe(**{**defaults, **values})


def _engine(values: Mapping[str, Any], method: Method) -> str:
    """What runs the stages by default; refuses streams where there can be none."""
    on_gpu, reason = values.get("device") == "cuda", method.why_not_capturable()
    if values.get("engine") == "streams" and not on_gpu:
        raise UserError("engine streams without a GPU: it runs the stages on streams of one, add --device cuda")
    if values.get("engine") == "streams" and reason:
        raise UserError(f"engine streams with {method.name}, which {reason}: use simulate or processes")
    if values["K"] == 1 or (on_gpu and reason):
        return "simulate"
    return "streams" if on_gpu else "processes"


def _check(values: Mapping[str, Any]) -> None:
    """What can be wrong without looking at data or model."""
    if values.get("engine", ENGINES[0]) not in ENGINES:
        raise unknown("engine", values["engine"], ENGINES)
    for name, allowed in (
        ("units", ("blocks", "layers")),
        ("partition", ("flops", "measured")),
        ("device", ("cpu", "cuda")),
        ("precision", ("fp32", "tf32", "bf16")),
        ("checkpoint_mode", ("in-flight", "drained")),
        ("weighting", ("batches", "samples")),
        ("on_nan", ("stop", "skip", "rollback")),
    ):
        if values.get(name, allowed[0]) not in allowed:
            raise unknown(name, values[name], allowed)
    least = {
        "K": 1,
        "epochs": 1,
        "batch_size": 1,
        "threads_per_stage": 1,
        "data_workers": 0,
        "seed": 0,
        "keep": 1,
        "trace": 1,
        "diagnose": 1,
    }
    for name, smallest in least.items():
        if name in values and values[name] < smallest:
            raise UserError(f"{name.replace('_', '-')} = {values[name]}: use a whole number from {smallest} up")
        if name in values and name != "K" and values[name] > MOST:  # the model says what K can be
            raise UserError(f"{name.replace('_', '-')} = {values[name]}: use a whole number up to {MOST}")
    for name in ("classes", "samples", "shape"):  # what they can be at least, the data set says
        sizes = values.get(name, ())
        if max(sizes if isinstance(sizes, tuple) else (sizes,), default=0) > MOST:
            raise UserError(f"{name} = {sizes}: use whole numbers up to {MOST}")
    if values.get("compile") and values.get("fuse"):
        raise UserError("compile and fuse, both of which join operations of a stage: leave one of them out")
    if values.get("fuse") and values.get("device") != "cuda":
        raise UserError("fuse without a GPU, whose kernels it joins: add --device cuda, or leave it out")
    if values.get("tune") and values.get("device") != "cuda":
        raise UserError("tune without a GPU, where there is no cuDNN: add --device cuda, or leave it out")
    if values.get("trace", 1) > MOST_TURNS:
        raise UserError(f"trace = {values['trace']} local iterations: use a whole number up to {MOST_TURNS}")
    every = re.match(r"\s*(\d+)", values.get("checkpoint_every", ""))
    if every and float(every[1]) > MOST:
        raise UserError(f"checkpoint-every = {values['checkpoint_every']}: use a number up to {MOST}")
    for name in ("lr", "momentum", "weight_decay", "warmup", "clip_norm"):
        if name in values and not 0 <= values[name] < float("inf"):
            raise UserError(f"{name.replace('_', '-')} = {values[name]}: use a number from 0 up")
    if any(not 0 < speed < float("inf") for speed in values.get("speeds", ())):
        raise UserError(f"speeds {list(values['speeds'])}: use numbers above 0, one for each stage")
    fractions = list(values.get("milestones", ()))
    if fractions != sorted(fractions) or any(not 0 < fraction < float("inf") for fraction in fractions):
        raise UserError(f"milestones {fractions}: give increasing fractions of the epochs")


def load(path: Path) -> dict[str, Any]:
    """The settings in a run's config.json, checked for their names and types."""
    try:
        values = dict(json.loads(path.read_text())["recipe"])
    except FileNotFoundError:
        raise UserError(f"config {path} does not exist: give the config.json of a run") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"config {path} cannot be read ({first_line(error)}): give the config.json of a run") from None
    return settings(values, path)


def settings(values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """A recipe as it was read from JSON, checked for its names and types; `path` is where it stood."""
    types = {field.name: str(field.type) for field in fields(Recipe)}
    found = upgraded(values)
    for name, value in found.items():
        if name not in types:
            raise unknown(f"setting in {path}", name, types)
        if not _fits(value, types[name]):
            raise UserError(f"{path}: {name} = {values[name]!r} does not fit, it takes {types[name]}: correct it")
    takes = settings_of(found.get("method", PAPER["method"]))
    for name, value in found.get("settings", {}).items():
        try:
            if name in takes:
                takes[name].check(value)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
    return found


def upgraded(values: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe as it was read from JSON in the present form: earlier, settings of the method were fields of their own.

    >>> upgraded({"method": "fdg", "M": 1, "beta": 0.5, "m": None, "cuts": [2]})
    {'method': 'fdg', 'cuts': (2,), 'settings': {'M': 1, 'beta': 0.5}}
    """
    found = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    earlier = {name: found.pop(name) for name in EARLIER if name in found}
    own = found.get("settings", {})
    if not earlier or not isinstance(own, dict):
        return found
    return {**found, "settings": {**{name: value for name, value in earlier.items() if value is not None}, **own}}


def changed(before: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a recipe with others instead of some; another method starts from its own settings.

    >>> changed({"method": "adl", "settings": {"M": 2}}, {"settings": {"corrector": "sc"}})["settings"]
    {'M': 2, 'corrector': 'sc'}
    """
    name = given.get("method", before.get("method", PAPER["method"]))
    kept = before.get("settings", {}) if name == before.get("method", PAPER["method"]) else {}
    takes = settings_of(name)  # what it states without taking it follows the others
    kept = {setting: value for setting, value in kept.items() if setting in takes}
    return {**before, **given, "settings": {**kept, **given.get("settings", {})}}


def _fits(value: Any, annotation: str) -> bool:
    """Whether a JSON value fits one of the types that recipes use."""
    if value is None:
        return "None" in annotation
    if isinstance(value, dict) or annotation.startswith("dict"):
        return isinstance(value, dict) and annotation.startswith("dict")
    if isinstance(value, tuple):
        numbers = (int, float) if "float" in annotation else (int,)
        return annotation.startswith("tuple") and all(type(item) in numbers for item in value)
    if isinstance(value, bool) or annotation.startswith(("tuple", "bool")):
        return isinstance(value, bool) and annotation.startswith("bool")
    allowed = {"int": (int,), "float": (int, float)}.get(annotation.split(" | ")[0], (str,))
    return isinstance(value, allowed)
