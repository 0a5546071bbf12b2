"""Errors that a user can act on: what was given, what is allowed and what to do next, in one line."""

from __future__ import annotations

import difflib
import importlib.util
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from offbeat.call_stack import INSIDE, calling_frame


class UserError(ValueError):
    """Bad input or a failed run, in one line; the command line prints it and exits with 2.

    An argument is written as in Python, with or without a value: ``batch_size=32``, ``out=``. The command line prints
    these as its options: ``--batch-size 32``, ``--out``.

    >>> import offbeat
    >>> offbeat.ADL(M=0)
    Traceback (most recent call last):
    offbeat.errors.UserError: M=0 gradients per update: use an integer of at least 1
    """

    def __init__(self, text: str = "") -> None:
        super().__init__(shortened(text))


def shortened(text: str) -> str:
    """The text without most digits of very long numbers.

    >>> shortened(f"lr={10**400}: use a finite number")
    'lr=1000...0000 (401 digits): use a finite number'
    """
    return re.sub(r"(?<![\w./])\d{50,}(?![\w/])", lambda it: f"{it[0][:4]}...{it[0][-4:]} ({len(it[0])} digits)", text)


class PackageMissing(UserError):
    """An optional package is not installed; names the extra that installs it."""


OPTIONAL = {  # module: name of its package, and the extra of Offbeat that installs it
    "altair": ("altair", "report"),
    "vl_convert": ("vl-convert-python", "report"),
    "jinja2": ("jinja2", "report"),
    "sklearn": ("scikit-learn", "digits"),
    "PIL": ("pillow", "images"),
    "tensorboard": ("tensorboard", "tensorboard"),
    "transformers": ("transformers", "transformers"),
    "tokenizers": ("tokenizers", "transformers"),
}


def require(modules: Iterable[str], purpose: str) -> None:
    """Raise PackageMissing where one of these optional modules is not installed, with the extra that brings it, if any.

    >>> require(["json"], "reading needs")
    """
    for module in modules:
        if importlib.util.find_spec(module) is None:
            package, extra = OPTIONAL.get(module, (module, None))
            installs = f"'offbeat[{extra}]'" if extra else package
            raise PackageMissing(
                f"{purpose} the package {package}, which is not installed: run `pip install {installs}`"
            )


class FolderTaken(UserError):
    """A folder belongs to another run, so this one writes nothing there."""


class NotFinite(UserError):
    """A loss or a gradient became NaN or infinite; names the stage and the batches.

    >>> import torch, offbeat
    >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1))
    >>> pipe = offbeat.Pipeline(layers, K=2, loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD)
    >>> try:
    ...     pipe.step(torch.full((4, 2), float("nan")), torch.zeros(4, 1))
    ... except offbeat.NotFinite as error:
    ...     print(error.batches)
    (0,)
    """

    def __init__(self, text: str, batches: Iterable[int] = ()) -> None:
        super().__init__(text)
        self.batches = tuple(batches)


class StageLost(UserError):
    """The process of another stage is gone; names the stage."""


class StageSilent(StageLost):
    """The process of another stage runs, as far as is known, but has not answered for too long; names the stage."""


class CallTimeout(StageLost):
    """The calls of the processes differ, so that some have waited for too long or have met; names the calls."""


class NotRecorded(UserWarning):
    """A stage launches its operations one by one on a GPU, and could replay a recording; names the stage and reason."""


class NotCompiled(UserWarning):
    """A stage runs without torch.compile; names the stage and the reason."""


class NotFused(UserWarning):
    """A stage runs without fused kernels; names the stage and the reason."""


class LateGradients(UserWarning):
    """Method "auto" was not given the samples per update, so that gradients are later than they need be.

    >>> import warnings, torch, offbeat
    >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1))
    >>> options = {"loss": torch.nn.functional.mse_loss, "optimizer": torch.optim.SGD}
    >>> with warnings.catch_warnings(action="error", category=offbeat.LateGradients):  # doctest: +ELLIPSIS
    ...     offbeat.Pipeline(layers, K=2, method="auto", **options)
    Traceback (most recent call last):
    offbeat.errors.LateGradients: method="auto" without batch=: M=1, every batch is an update...
    """


class Unbalanced(UserWarning):
    """The slowest stage of a partition is much slower than the mean; names the unit that causes it.

    >>> import warnings, torch, offbeat
    >>> layers = torch.nn.Sequential(torch.nn.Linear(400, 400), torch.nn.Linear(400, 1), torch.nn.Linear(1, 1))
    >>> with warnings.catch_warnings(action="error", category=offbeat.Unbalanced):  # doctest: +ELLIPSIS
    ...     offbeat.partition(layers, 2, torch.ones(4, 400))
    Traceback (most recent call last):
    offbeat.errors.Unbalanced: uneven cuts: stage 1 of 2 has 2.00 times the mean cost...
    """


class ModelOutdated(UserWarning):
    """`pipe.model` was read where the weights of other processes' stages are not the newest."""


class NotRestored(UserWarning):
    """Part of a checkpoint could not be used: batches in flight at another K, or a newer checkpoint that is damaged.

    >>> import tempfile, warnings, torch, offbeat
    >>> def build(K):
    ...     layers = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    ...     return offbeat.Pipeline(layers, K=K, loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD)
    >>> two, three, batch = build(K=2), build(K=3), (torch.ones(4, 2), torch.zeros(4, 1))
    >>> folder = tempfile.mkdtemp()
    >>> with warnings.catch_warnings(record=True, action="always") as found:
    ...     _ = two.step(*batch), two.save(folder), three.load(folder), three.step(*batch)
    >>> print(found[-1].message)
    batch 0, which was in flight, is lost by the change
    """


class ScheduleLength(UserWarning):
    """The length of a learning-rate scheduler is not the number of updates that were made, method "auto" begins with a
    synchronous start of more than half of the updates, or a run ends before its staleness warm-up or its first
    diagnosis; names both numbers.

    >>> import warnings, torch, offbeat
    >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1))
    >>> pipe = offbeat.Pipeline(layers, K=2, M=2, loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD,
    ...                         scheduler=lambda sgd: torch.optim.lr_scheduler.CosineAnnealingLR(sgd, T_max=4))
    >>> with warnings.catch_warnings(action="error", category=offbeat.ScheduleLength):  # doctest: +ELLIPSIS
    ...     pipe.fit([(torch.ones(4, 2), torch.zeros(4, 1))] * 4)
    Traceback (most recent call last):
    offbeat.errors.ScheduleLength: scheduler CosineAnnealingLR has 4 steps and was not used up...
    """


class Interrupted(Exception):
    """Ctrl-C, with a line for the user; the command line exits with code 130."""


@cache
def print_once(line: str) -> None:
    """Print a line on standard error, the same line only once in a process."""
    print(line, file=sys.stderr)


def unknown(kind: str, name: object, allowed: Iterable[str]) -> UserError:
    """The error for a name that does not exist, with the nearest one that does.

    >>> print(unknown("method", "ald", ["adl", "bp"]))
    unknown method 'ald': did you mean 'adl'? (one of adl, bp)
    >>> print(unknown("on_nan", "skp", ["raise", "skip"]))  # an argument, which the command line prints as its option
    unknown on_nan='skp': did you mean 'skip'? (one of raise, skip)
    """
    names = list(allowed)
    nearest = difflib.get_close_matches(str(name).lower(), names, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}? (one of " if nearest else "use one of ("
    separator = "=" if "_" in kind else " "
    return UserError(f"unknown {kind}{separator}{name!r}: {hint}{', '.join(names)})")


def number(value: Any, meaning: str, allowed: str, fits: Callable[[float], bool], *, whole: bool = False) -> None:
    """Refuse a value that is not a number, or not an allowed one.

    >>> number(2, "beta", "use a factor from 0 to 1", lambda beta: 0 <= beta <= 1)
    Traceback (most recent call last):
    offbeat.errors.UserError: beta=2: use a factor from 0 to 1
    """
    kind = int if whole else int | float
    if isinstance(value, bool) or not isinstance(value, kind) or not fits(value):
        equals = "=" if meaning.isidentifier() else " = "
        raise UserError(f"{meaning}{equals}{value!r}: {allowed}")


def nonnegative(value: float) -> bool:
    """Whether the value is finite and at least 0."""
    return 0 <= value <= sys.float_info.max


def attempted(make: Callable[[], Any]) -> dict[str, Any]:
    """The result of `make`, or the UserError that it raises, in the first process, which sends either to the others.

    >>> attempted(lambda: 3)
    {'made': 3}
    """
    try:
        return {"made": make()}
    except UserError as error:
        return {"refused": str(error)}


def result_of(outcome: dict[str, Any], *, refused: type[UserError] = UserError) -> Any:
    """The result that `attempted` returned in the first process; its error is raised in every process, so that none
    is left waiting.

    >>> result_of(attempted(lambda: number(2, "beta", "use a factor below 1", lambda beta: beta < 1)))
    Traceback (most recent call last):
    offbeat.errors.UserError: beta=2: use a factor below 1
    """
    if "refused" in outcome:
        raise refused(outcome["refused"])
    return outcome["made"]


def earliest(found: Iterable[NotFinite]) -> NotFinite:
    """The likely cause of several values that are not finite: the one whose last batch is the earliest."""
    return min(found, key=lambda error: max(error.batches))


def warn_caller(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn with the line that called the package, however deep the warning is inside of it.

    >>> import warnings
    >>> with warnings.catch_warnings(record=True) as found:
    ...     warnings.simplefilter("always")
    ...     warn_caller("the loss is not finite")
    >>> found[0].filename == __file__
    False
    """
    frame, between = calling_frame(*INSIDE)
    warnings.warn(text, category, stacklevel=len(between) + (frame is not None))


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type where it has none."""
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__


def named(error: BaseException) -> str:
    """The first line of an error's text, after its type where it is not an error in one line of its own.

    >>> named(UserError("M=0: use 1")), named(KeyError("label"))
    ('M=0: use 1', "KeyError: 'label'")
    """
    text = first_line(error)
    kind = type(error).__name__
    return text if isinstance(error, UserError) or text == kind else f"{kind}: {text}"


def stage_name(rank: int, K: int, replicas: int = 1) -> str:
    """The stage of the process of that rank, for errors.

    >>> stage_name(1, 2), stage_name(2, 2, 2)
    ('stage 2', 'stage 1 of replica 1')
    """
    return f"stage {rank % K + 1}{f' of replica {rank // K}' * (replicas > 1)}"
