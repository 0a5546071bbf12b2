"""The recipe of a run: everything that determines its results, with the paper's settings as defaults."""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache, lru_cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from offbeat.correctors import CORRECTORS, Corrector, as_text
from offbeat.errors import LateGradients, UserError, first_line, unknown, warn_caller
from offbeat.method import Method, Weights
from offbeat.methods import AUTO, METHODS, settings_of, with_settings
from offbeat.ops import WindowRule
from offbeat.recommended import check_settings, needs_times, recommend, without_batch
from offbeat.runs.epochs import Epochs
from offbeat.runs.group import from_first
from offbeat.runs.launch import cores
from offbeat.runs.optimizers import OPTIMIZERS, SETTINGS, options
from offbeat.runs.task import LearningTask, default_names, task_of
from offbeat.settings import LARGEST
from offbeat.timeline import MOST_TURNS

ENGINES = ("simulate", "processes", "streams")
SMALLEST = {
    "K": 1,
    "replicas": 1,
    "epochs": 1,
    "batch_size": 1,
    "batch_per_update": 1,
    "threads_per_stage": 1,
    "data_workers": 0,
    "seed": 0,
    "keep": 0,
    "trace": 1,
    "diagnose": 1,
}
RESOLVED = ("M", "weights", "window")  # settings that every recipe contains, given or not
# Settings of the method that were fields in recipes of earlier versions; None if not given.
EARLIER = ("M", "weights", "window", "corrector", "m", "beta", "N", "recompute", "barrier", "conditional", "buffer")
TYPES = {  # of the fields of a recipe, in words
    "str": "text",
    "int": "an integer",
    "float": "a number",
    "bool": "True or False",
    "tuple[int, ...]": "a tuple of integers",
    "tuple[float, ...]": "a tuple of numbers",
    "dict[str, Any]": "a dict of settings of the method",
}
PAPER: dict[str, Any] = {"method": "adl", "K": 1, "batch_size": 32, "seed": 0}
SCHEDULES = {"steps": "milestones", "cosine": "floor"}  # the setting that each schedule takes
COSINE_FLOOR = 0.1
WARMUP_START = 0.01  # as in the released code: warm-up from 1 % of the learning rate


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of a training run; `make_recipe` fills in those that are not given.

    `settings` are those of the method: M, weights and window always, others if given.

    >>> recipe = make_recipe(method="adl", M=2, K=4, batch_size=8, corrector="sc")
    >>> recipe.M, recipe.weights, recipe.window, recipe.corrector, recipe.samples_per_update
    (2, 'stash', 'count', 'sc', 16)
    >>> recipe.task.name, recipe.staleness_warmup
    ('classification', None)
    """

    model: str
    data: str
    data_dir: str | None = None
    shape: tuple[int, ...] | None = None
    classes: int | None = None
    samples: int | None = None
    tokenizer: str | None = None
    data_workers: int | None = None  # None: the number of cores, at most 8
    method: str
    settings: dict[str, Any] = field(hash=False)
    K: int
    replicas: int = 1  # copies of all stages, each with its own share of the batches
    engine: str
    device: Literal["cpu", "cuda"] = "cpu"
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    messages: Literal["exact", "bf16", "int8"] = "exact"
    compile: bool = False
    fuse: bool = False
    tune: bool = False
    cuts: tuple[int, ...] | None = None
    units: Literal["blocks", "layers"] | None = None
    partition: Literal["flops", "measured"] = "flops"
    speeds: tuple[float, ...] | None = None
    epochs: int
    batch_size: int
    batch_per_update: int | None = None  # samples, where they were given instead of the batch size
    drop_last: bool = False  # drop an incomplete last batch of an epoch
    weighting: Literal["batches", "samples"] = "batches"  # of the mean gradient of an update
    optimizer: Literal["sgd", "adamw", "nadam", "muon", "rotated-adam"] = "sgd"
    lr: float
    momentum: float | None  # of sgd and muon
    betas: tuple[float, ...] | None = None  # of adamw, nadam, muon and rotated-adam
    weight_decay: float
    warmup: float  # epochs
    schedule: Literal["steps", "cosine"] = "steps"
    milestones: tuple[float, ...]  # of steps
    floor: float | None = None  # of cosine
    clip_norm: float | None = None
    clip_over: Literal["stage", "model"] = "stage"  # the parameters that this norm is of
    seed: int
    threads_per_stage: int
    checkpoint_every: str | None = None
    checkpoint_mode: Literal["in-flight", "drained"] = "in-flight"
    keep: int = 3
    on_nan: Literal["stop", "skip", "rollback"] = "stop"
    left_out: tuple[int, ...] | None = None  # batches to leave out, after a loss that was not finite
    trace: int | None = None  # local iterations to record; does not change results
    diagnose: int | None = None  # updates between two diagnoses of late gradients; likewise

    @property
    def M(self) -> int:  # noqa: N802
        """Gradients per update."""
        return int(self.settings["M"])

    @property
    def weights(self) -> Weights:
        """Weights of a backward, as `Method` has them."""
        found: Weights = self.settings["weights"]
        return found

    @property
    def window(self) -> WindowRule:
        """When an update is due, as `Method` has it."""
        found: WindowRule = self.settings["window"]
        return found

    @property
    def corrector(self) -> str | None:
        """The correctors as text; None where none are given."""
        return self.settings.get("corrector")

    @property
    def samples_per_update(self) -> int:
        """Samples whose gradients make one update, in all replicas."""
        return self.batch_size * self.M * self.replicas

    @property
    def staleness_warmup(self) -> int | str | None:
        """The warm-up of the staleness, as it was given."""
        return self.settings.get("staleness_warmup")

    @property
    def task(self) -> LearningTask:
        """What the data is for."""
        return task_of(self.data)

    def make_method(self) -> Method:
        """The method, with its settings.

        >>> make_recipe(method="adl", M=2).make_method().staleness(1, 4)
        3.0
        """
        return with_settings(self.method, self.settings)

    def count(self, samples: int) -> Epochs:
        """The epochs of a new run of this recipe, with this many samples per epoch; a batch of each replica counts as
        one. A batch must not have more samples than an epoch: its learning rate would be for samples that it lacks.

        >>> make_recipe(batch_size=8).count(samples=100).per_epoch
        13
        """
        size = self.batch_size * self.replicas
        if samples < size:
            raise UserError(self._too_large(samples))
        return Epochs(samples=samples, batch_size=size, drop_last=self.drop_last)

    def _too_large(self, samples: int) -> str:
        """Why an epoch of this many samples, fewer than a batch of each replica, cannot be trained."""
        name, given, most = "batch_size", f"batch_size={self.batch_size}", samples
        if self.batch_per_update is not None:
            name, most = "batch_per_update", samples * self.M
            given = f"batch_per_update={self.batch_per_update} in batches of {self.batch_size}"
        if self.replicas > 1:
            return (
                f"replicas={self.replicas} with {given}: a batch of each needs {self.batch_size * self.replicas} "
                f"samples, but an epoch has {samples}; use a smaller {name}= or fewer replicas="
            )
        return f"{given}, but an epoch has {samples} samples: use {name}={most} or less"

    def learning_rate(self, counted: Epochs) -> Callable[[int], float]:
        """Factor of lr for update s, counted as batch M*s: linear warm-up, then the schedule.

        steps divides the learning rate by 10 at each milestone; cosine decreases it to `floor` times lr at the end of
        the last epoch.

        >>> recipe = make_recipe(M=2, epochs=4, warmup=1.0, milestones=(0.5, 0.75), batch_size=8)
        >>> factor = recipe.learning_rate(recipe.count(samples=80))
        >>> [round(factor(s), 4) for s in (0, 4, 5, 9, 10, 15)]
        [0.01, 0.802, 1.0, 1.0, 0.1, 0.01]
        >>> recipe = make_recipe(M=2, epochs=4, warmup=1.0, schedule="cosine", batch_size=8)
        >>> factor = recipe.learning_rate(recipe.count(samples=80))
        >>> [round(factor(s), 4) for s in (0, 4, 5, 10, 15, 20)]
        [0.01, 0.802, 1.0, 0.775, 0.325, 0.1]
        """
        M, ramp, end = self.M, self.warmup * counted.per_epoch, self.epochs * counted.per_epoch
        drops = [fraction * self.epochs * counted.per_epoch for fraction in self.milestones]

        @lru_cache(maxsize=1024)  # all stages make the same updates
        def cached(s: int) -> float:
            batch = counted.progress(M * s)
            if batch < ramp:
                return WARMUP_START + (1 - WARMUP_START) * batch / ramp
            if self.floor is None:
                return 0.1 ** bisect_right(drops, batch)
            left = (1 + math.cos(math.pi * (batch - ramp) / (end - ramp))) / 2 if batch < end else 0.0
            return self.floor + (1 - self.floor) * left

        def factor(s: int) -> float:  # a plain function, whose contents LambdaLR does not save
            return cached(s)

        return factor

    def as_dict(self) -> dict[str, Any]:
        """All settings as plain values, for JSON.

        >>> make_recipe(M=2).as_dict()["settings"]
        {'M': 2, 'weights': 'stash', 'window': 'count'}
        """
        return asdict(self)


def split_update(samples: int, M: int, replicas: int = 1) -> int:
    """The size of each of the M batches of each replica, in an update of this many samples."""
    if replicas > 1 and samples % (M * replicas):
        raise UserError(
            f"batch_per_update={samples} with M = {M} and replicas={replicas}: {samples} samples cannot be split into "
            f"{M * replicas} equal batches, use a multiple of {M * replicas}"
        )
    if samples % M:
        raise UserError(
            f"batch_per_update={samples} with M = {M}: {samples} samples cannot be split into {M} equal batches, use a "
            f"multiple of {M}"
        )
    return samples // (M * replicas)


def _check_names(given: Iterable[str], names: Iterable[str]) -> None:
    """Refuse a name that is no setting of any method, but almost one of a recipe."""
    own = {field.name for field in fields(Method)}.union(*(settings_of(method) for method in METHODS))
    for name in given:
        if name not in own and (nearest := difflib.get_close_matches(name, names, n=1, cutoff=0.7)):
            raise UserError(f"unknown setting {name!r}: did you mean {nearest[0]!r}?")


def make_recipe(**given: Any) -> Recipe:
    """A recipe with these settings, and for all others the paper's, or those of text; None means not given.

    Names that are not fields of `Recipe` are settings of the method. A setting of the method that has the name of a
    field is given in `settings`. `batch_per_update` instead of `batch_size` is the number of samples of an update,
    which are split into M batches. method="auto" chooses method and M (see recommended.py), and corrector "auto".

    With `replicas`, each has batches of `batch_size` samples, and an incomplete last one is not used (`drop_last`).

    Defaults: SGD with lr = 0.1 * batch_size * M * replicas / 256 and momentum 0.9; CIFAR and similar data: 300 epochs,
    weight decay 5e-4, learning rate divided by 10 at 1/2, 3/4 and 11/12 of the epochs; image folders: 90 epochs, 1e-4,
    and 1/3, 2/3, 8/9. Text: AdamW with lr = 1e-3, betas 0.9 and 0.95 and weight decay 0.1; one epoch; linear warm-up
    over the first twentieth, then a cosine to 10 %.

    >>> recipe = make_recipe(method="adl", K=4, M=4)
    >>> recipe.lr, recipe.epochs, recipe.engine
    (0.05, 300, 'processes')
    >>> [(recipe.batch_size, recipe.lr) for M in (1, 4) for recipe in [make_recipe(batch_per_update=256, M=M)]]
    [(256, 0.1), (64, 0.1)]
    >>> make_recipe(method="dni", lr=0.1, settings={"lr": 1e-4}).settings
    {'M': 1, 'weights': 'stash', 'window': 'count', 'lr': 0.0001}
    """
    values = given_values(given)
    if values.get("method") == AUTO:
        values = _with_chosen_method(values)
    own_size = values.get("batch_size")
    values = {**PAPER, **values}
    check_types(values)
    values["model"], values["data"] = default_names(values.get("model"), values.get("data"))
    task = task_of(values["data"])
    values.setdefault("optimizer", task.defaults["optimizer"])
    values.setdefault("schedule", "steps" if "milestones" in values else task.defaults["schedule"])
    names = {field.name for field in fields(Recipe)}
    given = {**values.pop("settings", {}), **{name: values.pop(name) for name in list(values) if name not in names}}
    _check(values)
    _check_names(given, names)
    method = with_settings(values["method"], given)
    if "batch_per_update" in values:
        values["batch_size"] = split_update(values["batch_per_update"], method.M, values.get("replicas", 1))
    if own_size not in (None, values["batch_size"]):
        raise UserError(
            f"batch_size={own_size} with batch_per_update={values['batch_per_update']} and M = {method.M}: leave out "
            "batch_size= or batch_per_update="
        )
    replicas = values.get("replicas", 1)
    if replicas > 1:
        values["drop_last"] = True  # replicas must have equally many batches
    taken = sorted(given.keys() & settings_of(values["method"]).keys() - set(RESOLVED))
    optimizer = OPTIMIZERS[values["optimizer"]]
    defaults = {
        "settings": {name: getattr(method, name) for name in RESOLVED} | {name: given[name] for name in taken},
        "engine": _engine(values, method),
        "lr": optimizer.lr(values["batch_size"] * replicas, method.M),
        **task.defaults,
        **dict.fromkeys(SETTINGS),
        **optimizer.defaults,
        "threads_per_stage": max(1, cores() // (values["K"] * replicas)),
    }
    if values["data"] == "imagefolder":
        defaults |= {"epochs": 90, "milestones": (1 / 3, 2 / 3, 8 / 9)}
        defaults |= {"weight_decay": 1e-4} if values["optimizer"] == "sgd" else {}
    if task.warmup_share is not None:
        defaults["warmup"] = task.warmup_share * values.get("epochs", defaults["epochs"])
    if values["schedule"] == "cosine":
        defaults |= {"milestones": (), "floor": COSINE_FLOOR}
    made = Recipe(**{**defaults, **values})
    _check_correctors(made, method)
    if made.clip_over == "model":
        from offbeat.pipeline.checks import check_clipping

        check_clipping(made.clip_norm, made.clip_over, method)
    return made


def _with_chosen_method(values: Mapping[str, Any]) -> dict[str, Any]:
    """The given values with the method that is recommended for them. Where M follows from measured times, the first
    process measures; the recipe has M, so that a run repeats without measuring."""
    names = {field.name for field in fields(Recipe)}
    settings = {**values.get("settings", {}), **{name: value for name, value in values.items() if name not in names}}
    others = {name: value for name, value in values.items() if name in names and name not in ("method", "settings")}
    check_types({**others, "settings": settings})
    check_settings(settings)
    K, batch = others.get("K", PAPER["K"]), others.get("batch_per_update")
    if batch is not None:
        batch = split_update(batch, 1, others.get("replicas", 1))  # of one replica
    if batch is None:
        if "M" not in settings and K > 1:
            warn_caller(without_batch("batch_per_update", K), LateGradients)
        settings = {"M": 1, **settings}
    unused = ("latency", "staleness_warmup") if K == 1 else ("latency",)
    passed = {name: value for name, value in settings.items() if name not in unused}
    trial = make_recipe(**others, method="adl-1f1b" if K > 1 else "bp", settings={"M": 1, **passed})
    measured: dict[str, Any] = {"batch": batch, "smallest": 1, "times": []}
    if needs_times(K, batch=batch, settings=settings):
        from offbeat.runs.measuring import measure_batches

        measured = from_first(lambda: measure_batches(trial, settings), key="auto")

    def updates() -> int:
        from offbeat.runs.measuring import count_samples

        counted = measured if "samples" in measured else from_first(lambda: count_samples(trial), key="samples")
        samples: int = counted["samples"]
        if samples < trial.batch_size * trial.replicas:  # an update of several epochs, in smaller batches
            return trial.epochs * samples // trial.samples_per_update
        return trial.epochs * trial.count(samples).per_epoch // trial.M

    method = recommend(
        K,
        batch=measured["batch"],
        settings=settings,
        seconds=dict(measured["times"]).__getitem__,
        smallest=measured["smallest"],
        updates=updates,
    ).method
    chosen: dict[str, Any] = {"M": method.M} | ({} if K == 1 else {"corrector": AUTO})
    for _, synchronous in method.staleness_warmup:
        chosen["staleness_warmup"] = synchronous
    return {**others, "method": method.name, "settings": {**chosen, **passed}}


def given_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """What is not None, as recipes have it."""
    return {name: _plain(value) for name, value in given.items() if value is not None}


def _plain(value: Any) -> Any:
    """A list as a tuple, a path and correctors as text: recipes are hashed, and written as JSON."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Corrector):
        return _plain([value])
    if isinstance(value, list | tuple) and value and all(isinstance(one, Corrector) for one in value):
        if own := [type(one).__name__ for one in value if CORRECTORS.get(one.name) is not type(one)]:
            raise UserError(
                f"corrector {own[0]} has no name that a recipe can be read from: give it to offbeat.Pipeline, or add "
                "it to CORRECTORS in offbeat/correctors/registry.py"
            )
        return as_text(value)
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return tuple(value) if isinstance(value, list) else value


def check_types(values: Mapping[str, Any]) -> None:
    """Raise UserError for fields of a recipe whose values have other types."""
    if isinstance(given := values.get("method"), Method):
        raise UserError(f"method is a Method: give its name and settings, as in method={given.name!r}, M={given.M}")
    for name, words in _choices().items():
        if not isinstance(values.get(name), str | None):
            raise UserError(f"{name}={values[name]!r}: use one of {', '.join(map(repr, words))}")
    for name, kind in ((each.name, str(each.type)) for each in fields(Recipe)):
        if name in values and not kind.startswith("Literal") and not _fits(values[name], kind):
            raise UserError(f"{name}={values[name]!r}: use {TYPES[kind.removesuffix(' | None')]}")


def _check_correctors(recipe: Recipe, method: Method) -> None:
    """Raise UserError for a corrector, also of the staleness warm-up, that does not work with the optimizer."""
    optimizer = OPTIMIZERS[recipe.optimizer]
    for corrector in (corrector for phase in method.phases for corrector in phase.correctors):
        usable = [name for name, kind in OPTIMIZERS.items() if {*corrector.needs} <= kind.provides]
        if recipe.optimizer not in usable:
            raise UserError(
                f"corrector {corrector.name} with optimizer={recipe.optimizer!r}: use one of {', '.join(usable)}"
            )
        for option in optimizer.rule.outside(options(recipe)) if corrector.needs else ():
            least, most = optimizer.rule.between[option]
            raise UserError(
                f"corrector {corrector.name} with {option}={getattr(recipe, option):g}: it needs the {option} of "
                f"{optimizer.title}, use one above {least:g} and below {most:g}"
            )


def _engine(values: Mapping[str, Any], method: Method) -> str:
    """The default engine; raises UserError if streams were given and are not possible."""
    on_gpu, reason = values.get("device") == "cuda", method.why_not_capturable()
    if values.get("engine") == "streams" and not on_gpu:
        raise UserError("engine='streams' without a GPU: it runs the stages on CUDA streams, add device='cuda'")
    if values.get("engine") == "streams" and values.get("replicas", 1) > 1:
        raise UserError(
            f"engine='streams' with replicas={values['replicas']}: on one GPU replicas share its time and gain "
            "nothing, use a larger M or batch_size, or engine='processes'"
        )
    if values.get("engine") == "streams" and reason:
        raise UserError(
            f"engine='streams' with {method.name}, which {reason}: use engine='simulate' or engine='processes'"
        )
    if values.get("replicas", 1) > 1:
        return "processes"
    if values["K"] == 1 or (on_gpu and reason):
        return "simulate"
    return "streams" if on_gpu else "processes"


def _check(values: Mapping[str, Any]) -> None:
    """Raise UserError for what is wrong whatever the data and the model are."""
    for name, allowed in {"engine": ENGINES, **_choices()}.items():
        if name in values and values[name] not in allowed:
            raise unknown(name, str(values[name]), allowed)
    for name in ("data_dir", "tokenizer"):
        if values.get(name) == "":
            raise UserError(f"{name}='': give the name of a file or folder, or leave it out")
    _check_integers(values)
    _check_numbers(values)
    on_gpu = values.get("device") == "cuda"
    if values.get("compile") and values.get("fuse"):
        raise UserError("compile=True with fuse=True: both join the operations of a stage, leave out one of them")
    for name, reason in (("fuse", "it joins kernels of a GPU"), ("tune", "it is for cuDNN")):
        if values.get(name) and not on_gpu:
            raise UserError(f"{name}=True without a GPU: {reason}, add device='cuda' or leave it out")


def _check_integers(values: Mapping[str, Any]) -> None:
    for name, smallest in SMALLEST.items():
        if name in values and values[name] < smallest:
            raise UserError(f"{name}={values[name]}: use an integer of at least {smallest}")
        if name in values and name != "K" and values[name] > LARGEST:  # the model limits K
            raise UserError(f"{name}={values[name]}: use an integer of at most {LARGEST}")
    for name in ("classes", "samples", "shape"):  # the data set checks the smallest
        sizes = values.get(name, ())
        if max(sizes if isinstance(sizes, tuple) else (sizes,), default=0) > LARGEST:
            raise UserError(f"{name}={sizes}: use integers of at most {LARGEST}")
    if values.get("trace", 1) > MOST_TURNS:
        raise UserError(f"trace={values['trace']}: use at most {MOST_TURNS} local iterations")
    every = re.match(r"\s*(\d+)", values.get("checkpoint_every", ""))
    if every and float(every[1]) > LARGEST:
        raise UserError(f"checkpoint_every={values['checkpoint_every']!r}: use a number of at most {LARGEST}")


def _check_numbers(values: Mapping[str, Any]) -> None:
    for name in ("lr", "momentum", "weight_decay", "warmup", "clip_norm"):
        if name in values and not 0 <= values[name] <= sys.float_info.max:
            raise UserError(f"{name}={values[name]}: use a finite number of at least 0")
    takes = OPTIMIZERS[values["optimizer"]].defaults
    for name in SETTINGS:
        if name in values and name not in takes:
            raise UserError(
                f"{name}={values[name]} with optimizer={values['optimizer']!r}, which takes {', '.join(takes)}: leave "
                "it out"
            )
    for schedule, name in SCHEDULES.items():
        if values.get(name) not in (None, ()) and schedule != values["schedule"]:
            raise UserError(
                f"{name}={values[name]} with schedule={values['schedule']!r}: it is for schedule={schedule!r}, "
                "use that or leave it out"
            )
    if not 0 <= values.get("floor", 0) <= 1:
        raise UserError(f"floor={values['floor']}: use a number from 0 to 1")
    betas = values.get("betas", (0.9, 0.95))
    if len(betas) != 2 or any(not 0 <= beta < 1 for beta in betas):
        raise UserError(f"betas={tuple(betas)}: use two numbers of at least 0 and below 1")
    speeds = values.get("speeds", ())
    if any(not 0 < speed < float("inf") for speed in speeds):
        raise UserError(f"speeds={tuple(speeds)}: use finite numbers above 0, one per stage")
    fractions = list(values.get("milestones", ()))
    if fractions != sorted(fractions) or any(not 0 < fraction < float("inf") for fraction in fractions):
        raise UserError(f"milestones={tuple(fractions)}: use finite, increasing fractions of the epochs, above 0")


@cache
def _choices() -> dict[str, tuple[str, ...]]:
    """The fields of a recipe that take one of a few words, with these words."""
    found = {}
    for name, hint in get_type_hints(Recipe).items():
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        words = tuple(word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind))
        if words:
            found[name] = words
    return found


def configured(config: Path | None, given: Mapping[str, Any]) -> Recipe:
    """The recipe of a run's config.json, if there is one, with these settings instead of its own."""
    return make_recipe(**changed(load(config) if config else {}, given))


def load(path: Path) -> dict[str, Any]:
    """The settings in the config.json of a run, with names and types checked."""
    try:
        values = dict(json.loads(path.read_text())["recipe"])
    except FileNotFoundError:
        raise UserError(f"config={str(path)!r} does not exist: give the config.json of a run") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"config={str(path)!r} cannot be read ({first_line(error)}): give the config.json of a run"
        ) from None
    return from_json(values, path)


def from_json(values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """A recipe that was read from JSON, with names and types checked; `path` is for errors."""
    types = {field.name: str(field.type) for field in fields(Recipe)}
    found = upgraded(values)
    for name, value in found.items():
        if name not in types:
            raise unknown(f"setting in {path}", name, types)
        if not _fits(value, types[name]):
            raise UserError(f'{path}: "{name}": {json.dumps(value)}: use a value of type {types[name]}')
    takes = settings_of(found.get("method", PAPER["method"]))
    for name, value in found.get("settings", {}).items():
        try:
            if name in takes:
                takes[name].check(value)
        except UserError as error:
            wrong = f'"{name}": {json.dumps(value)}: use {_in_json(takes[name].values)}'
            raise UserError(f"{path}: {error if takes[name].choices else wrong}") from None
    return found


def _in_json(text: str) -> str:
    """Values of Python as JSON has them.

    >>> _in_json("text such as 'sc', or None")
    'text such as "sc", or null'
    """
    for python, written in {"True": "true", "False": "false", "None": "null", "'": '"'}.items():
        text = text.replace(python, written)
    return text


def upgraded(values: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe that was read from JSON, in the present form: settings of the method used to be fields.

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
    """The values of a recipe with some replaced; another method, optimizer or schedule starts with its own settings.

    >>> changed({"method": "adl", "settings": {"M": 2}}, {"settings": {"corrector": "sc"}})["settings"]
    {'M': 2, 'corrector': 'sc'}
    """
    before = dict(before)
    if given.get("optimizer", before.get("optimizer", "sgd")) != before.get("optimizer", "sgd"):
        for setting in ("lr", *SETTINGS):  # of the other optimizer
            before.pop(setting, None)
    if given.get("schedule", before.get("schedule", "steps")) != before.get("schedule", "steps"):
        for setting in SCHEDULES.values():
            before.pop(setting, None)
    if given.get("batch_per_update") or (before.get("batch_per_update") and not given.get("batch_size")):
        before.pop("batch_size", None)  # follows from M
    elif given.get("batch_size"):
        before.pop("batch_per_update", None)
    name = given.get("method", before.get("method", PAPER["method"]))
    kept = before.get("settings", {}) if name == before.get("method", PAPER["method"]) else {}
    takes = settings_of(name)  # what it contains without taking it follows from the others
    kept = {setting: value for setting, value in kept.items() if setting in takes}
    return {**before, **given, "settings": {**kept, **given.get("settings", {})}}


def without_default_rate(before: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a recipe without its learning rate, where it is the optimizer's default for batch size and M."""
    kind = OPTIMIZERS[before.get("optimizer", "sgd")]
    size = before["batch_size"] * before.get("replicas", 1)
    follows = before["lr"] == kind.lr(size, before["settings"]["M"])
    return {name: value for name, value in before.items() if name != "lr" or not follows}


def _fits(value: Any, annotation: str) -> bool:
    """Whether a JSON value has the annotated type."""
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
