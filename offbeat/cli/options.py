"""Options shared by several commands: dataclasses whose fields `spread` turns into options of a command."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, make_dataclass
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

from offbeat.errors import UserError
from offbeat.methods import METHODS, STALENESS_WARMUP, parsed, settings_of

PANELS = {  # headings in the help, per group of options; NUMERICS have their own
    "Data": "Model and data",
    "OneMethod": "Method",
    "Stages": "Parallelism",
    "Running": "Parallelism",
    "OptimizationOptions": "Optimization",
    "Saving": "Checkpoints",
    "DiagnosisOptions": "Diagnosis",
}
NUMERICS = ("precision", "compile", "fuse", "tune")


MODEL = (
    "Network: a name that 'offbeat models' lists; gpt with settings: gpt:layers=12,width=256,heads=4,context=128;"
    " MODULE:FUNCTION, which returns a torch.nn.Module; or hf:PATH, a folder or config.json of transformers."
)

DATA = "Data set: cifar10, cifar100, imagefolder, digits, synthetic or text."

DATA_DIR = (
    "Folder or archive of the data; of text, a file or a folder of text files. "
    "(default OFFBEAT_DATA_DIR; text: OFFBEAT_TEXT, or the Python source of torch)"
)

SHAPE = "Shape of a sample: C,H,W, or the number of tokens. (default: the network's)"


@dataclass(frozen=True, kw_only=True)
class Data:
    """The network and its training data."""

    model: Annotated[str | None, typer.Option(help=f"{MODEL} (default resnet56; for text gpt)", metavar="NAME")] = None
    data: Annotated[
        str | None,
        typer.Option(help=f"{DATA} (default cifar10; for gpt text)"),
    ] = None
    data_dir: Annotated[
        str | None,
        typer.Option(help=DATA_DIR),
    ] = None
    shape: Annotated[
        str | None,
        typer.Option(
            help="Shape of a sample: C,H,W for data sets that can be resized; the number of tokens for text. "
            "(default: the network's context)"
        ),
    ] = None
    classes: Annotated[int | None, typer.Option(help="Number of classes of synthetic data.")] = None
    samples: Annotated[
        int | None, typer.Option(help="Number of samples of synthetic data, or of samples per epoch of text.")
    ] = None
    tokenizer: Annotated[
        str | None, typer.Option(help="tokenizer.json of Hugging Face's tokenizers, for text. (default: bytes)")
    ] = None
    data_workers: Annotated[
        int | None,
        typer.Option(help="Number of processes that decode an image folder. (default: the number of cores, at most 8)"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class OneMethod:
    """A training method and its settings. Options other than `method` are short forms of settings."""

    method: Annotated[
        str | None,
        typer.Option(
            help=f"Training method: auto (recommended for K and --batch-per-update), {', '.join(METHODS)}. "
            "With settings as in adl:M=4,corrector=sc; 'offbeat methods NAME' lists the settings. (default adl)"
        ),
    ] = None
    M: Annotated[int | None, typer.Option("-M", help="Gradients accumulated per update. (default: the method's)")] = (
        None
    )
    weights: Annotated[
        str | None, typer.Option(help="Weights of the backward: stash, hybrid or replay. (default: the method's)")
    ] = None
    window: Annotated[str | None, typer.Option(help="Accumulation window: count or aligned. (default count)")] = None
    recompute: Annotated[
        str | None,
        typer.Option(
            help="Hold inputs of batches in flight instead of graphs, and repeat forwards, with the same results: yes, "
            "or numbers of stages such as 1+2. (default no)"
        ),
    ] = None
    corrector: Annotated[str | None, typer.Option(help="Corrections of late gradients: auto, sc, lwp+sc, none.")] = None
    staleness_warmup: Annotated[
        str | None,
        typer.Option(
            help="Updates of exact back-propagation before the method, such as 500, whose M batches fill and drain the "
            "pipeline; or methods whose lag grows, such as bp@200+adl-1f1b@300. (default 0; method auto: 300, at most "
            "10 % of the run, if stage 1 is more than half an update late)"
        ),
    ] = None

    def given(self) -> dict[str, Any]:
        """The given name and settings of the method, in the form of a recipe."""
        short = {name: getattr(self, name) for name in ("M", "weights", "window", "corrector")}
        for setting in (STALENESS_WARMUP, settings_of("adl")["recompute"]):
            if (text := getattr(self, setting.name)) is not None:
                short[setting.name] = setting.read(text)
        if self.method is None:
            settings = {name: value for name, value in short.items() if value is not None}
            return {"settings": settings} if settings else {}
        name, settings = parsed(self.method, **short)
        return {"method": name, "settings": settings}


ENGINE = (
    "What runs the stages: simulate (one process), processes, or streams (one GPU). "
    "(default: processes if K > 1; streams on a GPU)"
)


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Where the network is cut into stages, and what runs them."""

    K: Annotated[int | None, typer.Option("-K", help="Number of stages. (default 1)")] = None
    engine: Annotated[str | None, typer.Option(help=ENGINE)] = None
    device: Annotated[str | None, typer.Option(help="Device: cpu or cuda. (default cpu)")] = None
    precision: Annotated[
        str | None,
        typer.Option(help="fp32, tf32 (on a GPU) or bf16. Weights and accumulation stay in fp32. (default fp32)"),
    ] = None
    messages: Annotated[
        str | None,
        typer.Option(help="Messages between stages: exact, or for slow links bf16 or int8. (default exact)"),
    ] = None
    compile: Annotated[bool | None, typer.Option(help="Compile each stage with torch.compile.")] = None
    fuse: Annotated[bool | None, typer.Option(help="Fuse BatchNorm, addition and ReLU into one kernel (GPU).")] = None
    tune: Annotated[
        bool | None, typer.Option(help="Let cuDNN benchmark its algorithms. Results may differ in the last bits.")
    ] = None
    cuts: Annotated[
        str | None, typer.Option(help="Cut before these units, such as 5,9,14. (default: balanced FLOPs)")
    ] = None
    units: Annotated[str | None, typer.Option(help="Units to cut between: blocks, or layers (also inside blocks).")] = (
        None
    )
    partition: Annotated[str | None, typer.Option(help="What to balance: flops or measured time. (default flops)")] = (
        None
    )
    speeds: Annotated[str | None, typer.Option(help="Relative speeds of the K workers, such as 1,1,0.5.")] = None
    threads_per_stage: Annotated[int | None, typer.Option(help="CPU threads per stage. (default: cores / K)")] = None


OF_A_ROW = ("K", "cuts", "units", "partition", "speeds")  # fixed by a published experiment

if TYPE_CHECKING:
    Running = Stages
else:  # made from Stages, so that a new option there is also one of published experiments
    hints = get_type_hints(Stages, include_extras=True)
    Running = make_dataclass(
        "Running",
        [(field.name, hints[field.name], None) for field in fields(Stages) if field.name not in OF_A_ROW],
        frozen=True,
        kw_only=True,
    )


@dataclass(frozen=True, kw_only=True)
class OptimizationOptions:
    """Length and optimizer of a run."""

    epochs: Annotated[int | None, typer.Option(help="Number of epochs. (default 300; image folders 90; text 1)")] = None
    batch_size: Annotated[int | None, typer.Option(help="Samples per batch, b. (default 32)")] = None
    batch_per_update: Annotated[
        int | None,
        typer.Option(help="Samples per update instead of --batch-size: each method splits them into M batches."),
    ] = None
    drop_last: Annotated[bool | None, typer.Option(help="Drop the last batch of an epoch if it is incomplete.")] = None
    weighting: Annotated[
        str | None, typer.Option(help="Average the gradients of an update over batches or samples. (default batches)")
    ] = None
    optimizer: Annotated[
        str | None, typer.Option(help="Optimizer: sgd, adamw, nadam, muon or rotated-adam. (default sgd; text adamw)")
    ] = None
    lr: Annotated[
        float | None, typer.Option(help="Learning rate. (default sgd 0.1 * b * M / 256; muon 3e-3; others 1e-3)")
    ] = None
    momentum: Annotated[float | None, typer.Option(help="Momentum of sgd and muon. (default 0.9; muon 0.95)")] = None
    betas: Annotated[
        str | None,
        typer.Option(
            help="Betas of the Adam optimizers, and of the AdamW in muon. (default 0.9,0.95; rotated-adam 0.95,0.95)"
        ),
    ] = None
    weight_decay: Annotated[
        float | None, typer.Option(help="Weight decay. (default sgd 5e-4, with image folders 1e-4; others 0.1)")
    ] = None
    warmup: Annotated[
        float | None,
        typer.Option(
            help="Epochs of linear warm-up from 1 % of the learning rate. (default 3; text 5 % of the epochs)"
        ),
    ] = None
    schedule: Annotated[
        str | None,
        typer.Option(
            help="Learning rate after the warm-up: steps (--milestones) or cosine (--floor). "
            "(default steps; text cosine)"
        ),
    ] = None
    milestones: Annotated[
        str | None,
        typer.Option(
            help="Steps: divide the learning rate by 10 at these fractions of the epochs. "
            "(default 1/2, 3/4, 11/12; image folders 1/3, 2/3, 8/9; text 0.8, 0.95)"
        ),
    ] = None
    floor: Annotated[
        float | None, typer.Option(help="Cosine: the learning rate at the end, as a fraction of --lr. (default 0.1)")
    ] = None
    clip_norm: Annotated[
        float | None, typer.Option(help="Clip the gradient norm of each update to this value, see --clip-over.")
    ] = None
    clip_over: Annotated[
        str | None,
        typer.Option(
            help="The norm to clip: that of each stage, or of the whole model (with a late method, from norms of "
            "earlier updates). (default stage)"
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Checkpoints of a run."""

    checkpoint_every: Annotated[
        str | None,
        typer.Option(
            help="Checkpoint interval: 500b (batches), 1e (epochs) or 10min. (default: at Ctrl-C, at the end, and "
            "every 10 minutes in several processes)"
        ),
    ] = None
    checkpoint_mode: Annotated[
        str | None,
        typer.Option(help="in-flight: save the batches in flight. drained: finish them first. (default in-flight)"),
    ] = None
    keep: Annotated[int | None, typer.Option(help="Number of checkpoints to keep; 0: none at the end. (default 3)")] = (
        None
    )
    on_nan: Annotated[
        str | None, typer.Option(help="If a loss or gradient is not finite: stop, skip or rollback. (default stop)")
    ] = None


@dataclass(frozen=True, kw_only=True)
class DiagnosisOptions:
    """Measurements during training, which do not change its results."""

    trace: Annotated[
        int | None,
        typer.Option(
            help="Record N local iterations of every stage, once the pipeline is full, in RUN/trace.json "
            "for Perfetto or chrome://tracing."
        ),
    ] = None
    diagnose: Annotated[
        int | None,
        typer.Option(
            help="Every N updates of a stage, record in RUN/diagnosis.jsonl how far its weights have moved "
            "since the forward of a batch, the cosine similarity of the late gradient and the gradient "
            "at the current weights, for the same input and incoming gradient, and the change of the loss that "
            "each of the two predicts for the update."
        ),
    ] = None


LISTS: dict[str, tuple[type[int] | type[float], str]] = {  # options with several numbers, and their separators
    "shape": (int, ",x"),
    "cuts": (int, ","),
    "speeds": (float, ","),
    "milestones": (float, ","),
    "betas": (float, ","),
}


def chosen(*groups: Data | OneMethod | Stages | OptimizationOptions | Saving | DiagnosisOptions) -> dict[str, Any]:
    """The given options, in the names and types of a recipe."""
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
        raise UserError(f"{option} {text!r}: use numbers separated by {separators[0]!r}") from None


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """The command with each parameter that is a dataclass replaced by the options that are its fields."""
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
    """The annotation of an option, with its heading in the help."""
    kind, option = get_args(annotation)
    option = copy(option)
    option.rich_help_panel = panel
    return Annotated[kind, option]
