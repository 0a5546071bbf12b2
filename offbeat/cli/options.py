"""Options that several commands take, declared once: dataclasses whose fields `spread` makes options of a command."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, make_dataclass
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

from offbeat.errors import UserError
from offbeat.methods import METHODS, parsed

PANELS = {  # of the help, by group of options; some options stand elsewhere
    "Data": "Model and data",
    "OneMethod": "Method",
    "Stages": "Parallelism",
    "Running": "Parallelism",
    "Schedule": "Optimisation",
    "Saving": "Checkpoints",
    "Looking": "Diagnosis",
}
NUMERICS = ("precision", "compile", "fuse", "tune")


@dataclass(frozen=True, kw_only=True)
class Data:
    """The network and what it learns."""

    model: Annotated[str | None, typer.Option(help="Network; see 'offbeat models'. (default resnet56)")] = None
    data: Annotated[
        str | None, typer.Option(help="Data set: cifar10, cifar100, imagefolder, digits, synthetic. (default cifar10)")
    ] = None
    data_dir: Annotated[str | None, typer.Option(help="Folder or archive that holds the data.")] = None
    shape: Annotated[str | None, typer.Option(help="C,H,W of a sample, for data that can take one.")] = None
    classes: Annotated[int | None, typer.Option(help="Classes of synthetic data.")] = None
    samples: Annotated[int | None, typer.Option(help="Samples of synthetic data.")] = None
    data_workers: Annotated[
        int | None, typer.Option(help="Processes that decode an image folder. (default the cores, at most 8)")
    ] = None


@dataclass(frozen=True, kw_only=True)
class OneMethod:
    """A method and its settings; it refuses those that it does not take. All but `method` are short forms."""

    method: Annotated[
        str | None,
        typer.Option(
            help=f"{', '.join(METHODS)}; with settings as in adl:M=4,corrector=sc; 'offbeat methods NAME' "
            "lists them. (default adl)"
        ),
    ] = None
    M: Annotated[int | None, typer.Option("-M", help="Gradients per update. (default the method's)")] = None
    weights: Annotated[str | None, typer.Option(help="stash, hybrid or replay. (default the method's)")] = None
    window: Annotated[str | None, typer.Option(help="count or aligned. (default count)")] = None
    corrector: Annotated[str | None, typer.Option(help="Corrections of late gradients, such as sc or lwp+sc.")] = None

    def given(self) -> dict[str, Any]:
        """The name of the method and its settings, as far as they were given, in the recipe's form."""
        short = {name: getattr(self, name) for name in ("M", "weights", "window", "corrector")}
        if self.method is None:
            settings = {name: value for name, value in short.items() if value is not None}
            return {"settings": settings} if settings else {}
        name, settings = parsed(self.method, **short)
        return {"method": name, "settings": settings}


ENGINE = "simulate, processes or, for one GPU, streams. (default for K > 1 processes, with a GPU streams)"


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Where the network is cut, and what runs its parts."""

    K: Annotated[int | None, typer.Option("-K", help="Stages. (default 1)")] = None
    engine: Annotated[str | None, typer.Option(help=ENGINE)] = None
    device: Annotated[str | None, typer.Option(help="cpu or cuda. (default cpu)")] = None
    precision: Annotated[
        str | None, typer.Option(help="fp32, tf32 (cuda) or bf16; weights and sums stay fp32. (default fp32)")
    ] = None
    compile: Annotated[bool | None, typer.Option(help="Compile each stage (torch.compile).")] = None
    fuse: Annotated[bool | None, typer.Option(help="Join BatchNorm, sum and ReLU: fewer kernels.")] = None
    tune: Annotated[
        bool | None, typer.Option(help="Let cuDNN choose algorithms by time. Results may differ in the last bits.")
    ] = None
    cuts: Annotated[str | None, typer.Option(help="Cut before these units: 5,9,14. (default equal FLOPs)")] = None
    units: Annotated[str | None, typer.Option(help="Cut between blocks, or layers (also inside blocks).")] = None
    partition: Annotated[str | None, typer.Option(help="Balance flops, or measured time. (default flops)")] = None
    speeds: Annotated[str | None, typer.Option(help="Speeds of the K workers, such as 1,1,0.5.")] = None
    threads_per_stage: Annotated[int | None, typer.Option(help="(default cores / K)")] = None


OF_A_ROW = ("K", "cuts", "units", "partition", "speeds")  # what a published experiment has decided already

if TYPE_CHECKING:
    Running = Stages
else:  # made from Stages, so that an option that is new there is one of published experiments too
    hints = get_type_hints(Stages, include_extras=True)
    Running = make_dataclass(
        "Running",
        [(field.name, hints[field.name], None) for field in fields(Stages) if field.name not in OF_A_ROW],
        frozen=True,
        kw_only=True,
    )


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How long and at which rate."""

    epochs: Annotated[int | None, typer.Option(help="(default 300; image folders 90)")] = None
    batch_size: Annotated[int | None, typer.Option(help="Samples per batch, b. (default 32)")] = None
    drop_last: Annotated[bool | None, typer.Option(help="Leave out the short last batch of an epoch.")] = None
    weighting: Annotated[
        str | None, typer.Option(help="Mean of an update over batches or over samples. (default batches)")
    ] = None
    lr: Annotated[float | None, typer.Option(help="Learning rate. (default 0.1 * b * M / 256)")] = None
    momentum: Annotated[float | None, typer.Option(help="(default 0.9)")] = None
    weight_decay: Annotated[float | None, typer.Option(help="(default 5e-4; image folders 1e-4)")] = None
    warmup: Annotated[float | None, typer.Option(help="Epochs of warm-up from 1 % of the rate. (default 3)")] = None
    milestones: Annotated[
        str | None,
        typer.Option(
            help="A tenth of the rate at these fractions of the epochs. "
            "(default 1/2, 3/4, 11/12; image folders 1/3, 2/3, 8/9)"
        ),
    ] = None
    clip_norm: Annotated[float | None, typer.Option(help="Largest gradient norm, stage by stage.")] = None


@dataclass(frozen=True, kw_only=True)
class Saving:
    """What is kept of a run against its end."""

    checkpoint_every: Annotated[
        str | None, typer.Option(help="Interval: 500b (batches), 1e (epochs), 10min. (default at Ctrl-C only)")
    ] = None
    checkpoint_mode: Annotated[
        str | None, typer.Option(help="in-flight, or drained: finish batches in flight first. (default in-flight)")
    ] = None
    keep: Annotated[int | None, typer.Option(help="Number of checkpoints to keep. (default 3)")] = None
    on_nan: Annotated[
        str | None, typer.Option(help="A loss or gradient that is not finite: stop, skip or rollback. (default stop)")
    ] = None


@dataclass(frozen=True, kw_only=True)
class Looking:
    """What is looked at while it trains; changes no number."""

    trace: Annotated[
        int | None,
        typer.Option(
            help="Record N local iterations of every stage, from when all stages are full, in "
            "RUN/trace.json for Perfetto or chrome://tracing."
        ),
    ] = None
    diagnose: Annotated[
        int | None,
        typer.Option(
            help="Every N updates of a stage, record in RUN/diagnosis.jsonl how far its weights have moved "
            "since the forward of a batch, and the cosine of the late gradient with that of the present "
            "weights for the same input and the same gradient from above."
        ),
    ] = None


LISTS: dict[str, tuple[type[int] | type[float], str]] = {  # options that hold several numbers, and what divides them
    "shape": (int, ",x"),
    "cuts": (int, ","),
    "speeds": (float, ","),
    "milestones": (float, ","),
}


def chosen(*groups: Data | OneMethod | Stages | Schedule | Saving | Looking) -> dict[str, Any]:
    """The settings that were given, in the recipe's names and types."""
    values: dict[str, Any] = {}
    for group in groups:
        values |= (
            group.given()
            if isinstance(group, OneMethod)
            else {field.name: getattr(group, field.name) for field in fields(group)}
        )
    for name, (kind, separators) in LISTS.items():
        if values.get(name) is not None:
            values[name] = numbers(values[name], kind, f"--{name}", separators)
    return {name: value for name, value in values.items() if value is not None}


def numbers(text: str | None, kind: type[int] | type[float], option: str, separators: str = ",") -> Any:
    """'5,9,14' as a tuple; None stays None."""
    if text is None:
        return None
    for separator in separators[1:]:
        text = text.replace(separator, separators[0])
    try:
        return tuple(kind(part) for part in text.split(separators[0]) if part.strip())
    except ValueError:
        raise UserError(f"{option} {text!r}: give numbers with {separators[0]!r} between them") from None


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """The command with every parameter that is a dataclass of options replaced by the options that are its fields."""
    own = inspect.signature(command, eval_str=True)
    annotations: dict[str, Any] = {name: parameter.annotation for name, parameter in own.parameters.items()}
    groups: dict[str, Any] = {name: annotation for name, annotation in annotations.items() if is_dataclass(annotation)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in own.parameters.items():
        if name not in groups:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        hints = get_type_hints(groups[name], include_extras=True)
        for field in fields(groups[name]):
            panel = "Numerics" if field.name in NUMERICS else PANELS[groups[name].__name__]
            parameters.append(
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=field.default,
                    annotation=_in_panel(hints[field.name], panel),
                )
            )

    @wraps(command)
    def gathered(**given: Any) -> None:
        made = {
            name: group(**{field.name: given.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**made, **given)

    vars(gathered)["__signature__"] = own.replace(parameters=parameters)  # what typer reads
    gathered.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return gathered


def _in_panel(annotation: Any, panel: str) -> Any:
    """The annotation of an option that stands in this panel of the help."""
    kind, option = get_args(annotation)
    option = copy(option)
    option.rich_help_panel = panel
    return Annotated[kind, option]
