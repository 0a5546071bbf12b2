"""What users give, checked before anything starts."""

from __future__ import annotations

import inspect
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from offbeat import methods
from offbeat.core.clipping import ClipOver
from offbeat.core.optimization import MakeOptimizer, MakeScheduler, arguments_of
from offbeat.core.stage_network import Loss
from offbeat.engines import Engine
from offbeat.errors import UserError, first_line, unknown
from offbeat.method import Method

Cuts = Sequence[int | str] | None


def model_of(given: nn.Module | Sequence[nn.Module], K: int | None, cuts: Cuts) -> tuple[nn.Module, int, Cuts]:
    """The model, K and the cuts that were given; of a list of stages, one model with the cuts between all of them."""
    if isinstance(given, nn.Module):
        return given, 1 if K is None else K, cuts
    model, between = _chained(given, K, cuts)
    return model, len(model), between


def _chained(stages: Sequence[nn.Module], K: int | None, cuts: object) -> tuple[nn.Sequential, list[int]]:
    """A list of K stages as one nn.Sequential, and the cuts between all of them."""
    listed = list(stages) if isinstance(stages, Iterable) else []
    if not listed or not all(isinstance(stage, nn.Module) for stage in listed):
        raise UserError(f"model is {kind_of(stages)}: give an nn.Module, or a list of them, one per stage")
    if K not in (None, len(listed)) or cuts is not None:
        raise UserError(f"a list of {len(listed)} stages is cut already: leave out cuts, and K or give K={len(listed)}")
    return nn.Sequential(*listed), list(range(1, len(listed)))


def method_of(method: Method | str, M: int | None) -> Method:
    """The method that was given as an object, or by a name with or without M."""
    if isinstance(method, str):
        return methods.with_settings(*methods.parsed(method, M=M))
    if not isinstance(method, Method):
        raise UserError(f"method {method!r}: use a method such as offbeat.ADL(M=4), or a name such as 'adl'")
    if M is not None:
        raise UserError(f"M={M} beside a method that has its own M: {_with_M(method, M)}")
    return method


def _with_M(method: Method, M: int) -> str:  # noqa: N802
    """How to give a method another M."""
    make = methods.METHODS.get(method.name)
    if make is None or "M" not in inspect.signature(make).parameters:
        return "leave one of them out"
    return f"use offbeat.{make.__name__}(M={M})"


def one_of(given: str, allowed: Any, name: str) -> Any:
    """A value of a Literal type."""
    if given not in get_args(allowed):
        raise unknown(name, given, get_args(allowed))
    return given


def device_of(device: torch.device | str | None) -> torch.device | None:
    try:
        return None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UserError(f"device {device!r}: {first_line(error)}") from error


def check_clipping(clip_norm: float | None, clip_over: ClipOver, method: Method) -> None:
    if clip_norm is not None and not (
        isinstance(clip_norm, Real) and (0 < clip_norm <= sys.float_info.max or clip_norm == math.inf)
    ):
        raise UserError(f"clip_norm={clip_norm!r}: use a number above 0, or None for no clipping")
    one_of(clip_over, ClipOver, "clip_over")
    if clip_over == "model" and clip_norm is None:
        raise UserError("clip_over='model' needs clip_norm=, the largest norm")
    if clip_over == "model" and method.feedback != "above":
        raise UserError(
            f"clip_over='model' with {method.name}, whose stages send no gradients down, which would carry norms: use "
            "clip_over='stage'"
        )


def check_options(*, seed: int, left_out: Sequence[int], compile: bool, fuse: bool) -> None:
    check_flags(compile=compile, fuse=fuse)
    whole(seed, "seed", least=0)
    listed = isinstance(left_out, Iterable) and not isinstance(left_out, str)
    if not listed or not all(isinstance(batch, Integral) for batch in left_out):
        raise UserError(f"left_out={left_out!r}: give the numbers of batches, counted from 0, as a list")
    if compile and fuse:
        raise UserError("compile=True and fuse=True: both join the operations of a stage, so give one of them")


def whole(value: Any, name: str, *, least: int) -> None:
    """Refuse what is no whole number, or a smaller one."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise UserError(f"{name}={value!r}: use a whole number from {least} up")


def check_flags(**given: object) -> None:
    for name, value in given.items():
        if not isinstance(value, bool):
            raise UserError(f"{name}={value!r}: use True or False")


def check_functions(**given: object) -> None:
    """Refuse arguments that are neither functions nor None."""
    for name, function in given.items():
        if function is not None and not callable(function):
            raise UserError(f"{name}={function!r}: give a function, or None")


def check_loader(given: object, *, functions: bool = True) -> None:
    if not isinstance(given, Iterable):
        more = ", or a function of the epoch" if functions else ""
        raise UserError(f"the loader is {kind_of(given)}: give an iterable of (x, y) or of dicts{more}")


def check_hooks(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise UserError(
                f"parameter {name} has a hook on its gradient, which late gradients do not reach, since stages "
                "differentiate copies: remove it (clip_norm and the optimizer see all gradients)"
            )


def check_loss(loss: Loss | None, method: Method) -> None:
    if loss is None:
        if method.head is not None:
            raise UserError(
                f"{method.name} trains stages on class labels, but loss=None leaves the loss to the model: give "
                "loss=..., a function of (output, target)"
            )
        return
    if not callable(loss):
        raise UserError(
            f"loss {loss!r}: give a function of (output, target) that returns the mean, or None where the model "
            "computes its loss"
        )
    if isinstance(loss, type):
        raise UserError(f"loss is the class {loss.__name__}: give an object, {loss.__name__}()")
    if isinstance(loss, nn.Module) and any(parameter.requires_grad for parameter in loss.parameters()):
        raise UserError("the loss has parameters of its own, which no stage would train: make them part of the model")


def check_makers(optimizer: MakeOptimizer, scheduler: MakeScheduler | None) -> None:
    """Every stage has its own optimizer, so what makes one is given; a finished optimizer holds all parameters."""
    if not callable(optimizer):
        raise UserError(
            f"optimizer is {kind_of(optimizer)}: give a function that makes one of a stage's parameters, "
            "such as lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
        )
    arguments_of(optimizer)
    if scheduler is not None and not callable(scheduler):
        raise UserError(
            f"scheduler is {kind_of(scheduler)}: give a function that makes one of a stage's optimizer, "
            "such as lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 100)"
        )


def batch_of_replica(batch: int | None, replicas: int) -> int | None:
    """The share of one replica in the samples of an update."""
    whole(replicas, "replicas", least=1)
    if batch is None or replicas == 1:
        return batch
    whole(batch, "batch", least=1)
    if batch % replicas:
        raise UserError(f"batch={batch} with replicas={replicas}: use a multiple of {replicas}, which splits it")
    return batch // replicas


def check_replicas(method: Method, replicas: int) -> None:
    """Refuse a method whose gradients are not all applied by the updates of its windows."""
    reason = method.why_no_replicas()
    if replicas > 1 and reason:
        raise UserError(f"{method.name} with replicas={replicas}: it {reason}, use another method, or replicas=1")


def check_engine(engine: Engine, K: int, replicas: int = 1, *, mesh: object = None) -> None:
    if not isinstance(getattr(engine, "K", None), int):
        raise UserError(f"engine is {kind_of(engine)}: give a name, such as 'simulate', or an engine")
    if mesh is not None:
        raise UserError("mesh= with an engine: give the mesh to the engine, Processes(K, replicas=R, mesh=mesh)")
    if engine.K != K:
        raise UserError(f"K={K}, but an engine for {engine.K} stages: give both the same number")
    if engine.replicas != replicas:
        raise UserError(f"replicas={replicas}, but an engine for {engine.replicas}: give both the same number")


def path_of(path: str | Path) -> Path:
    if path == "" or not isinstance(path, str | os.PathLike):
        raise UserError(f"path={path!r}: give a name, as text or a Path")
    return Path(path)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """For code that writes a file of a user: an OSError becomes a UserError in one line."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise UserError(f"cannot write {path} ({reason}): give the name of a file that can be written") from error


def kind_of(thing: object) -> str:
    return f"of type {type(thing).__name__}"
