"""offbeat bench, also with --until-loss; offbeat bench scaling."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from offbeat.cli.app import Application, app
from offbeat.cli.options import MODEL, SHAPE, numbers
from offbeat.errors import UserError
from offbeat.runs.launch import joined_group

TRAINING = "Training until a loss or error"
TRAINED_ONLY = ("samples", "every", "validation_samples", "data", "data_dir", "optimizer", "seed")
TIMED_ONLY = ("repetitions", "batches")

benches = Application(
    help="Time torch.distributed.pipelining, DDP and Offbeat in one run.", invoke_without_command=True
)
app.add_typer(benches, name="bench")


@benches.callback()
def bench(
    context: typer.Context,
    model: Annotated[str, typer.Option(help=MODEL, metavar="NAME")] = "resnet110",
    batch_size: Annotated[int | None, typer.Option(help="Samples per batch, over all workers. (default 128)")] = None,
    batch_per_update: Annotated[
        int | None,
        typer.Option(help="Samples per update instead of --batch-size: methods with M > 1 split them into M batches."),
    ] = None,
    K: Annotated[int, typer.Option("-K", help="Number of workers and stages.")] = 4,
    M: Annotated[
        int | None,
        typer.Option(
            "-M",
            help="Gradients accumulated per update, for methods that take M. (default 4; with --until-loss the largest "
            "number of micro-batches that is about as fast as the fastest)",
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="Settings of an Offbeat method, as in adl:corrector=sc; adds the method if it is not in the table. "
            "Can be repeated."
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="Rows to time: all, or some of bp-cores, bp-windows (GPU), torch-gpipe, torch-1f1b, torch-interleaved,"
            " ddp, adl-micro, adl-recompute, adl-1f1b-micro, adl-1f1b, ddg, fr, dsp, gpipe. bp and adl are always "
            "included. (default all; with --until-loss ddp,torch-1f1b,adl-1f1b)"
        ),
    ] = None,
    shape: Annotated[str | None, typer.Option(help=SHAPE)] = None,
    device: Annotated[str, typer.Option(help="cpu (one core per worker) or cuda (one GPU).")] = "cpu",
    precision: Annotated[str, typer.Option(help="fp32, or on a GPU tf32 or bf16.")] = "fp32",
    partition: Annotated[str, typer.Option(help="What to balance: measured time or flops.")] = "measured",
    cuts: Annotated[str | None, typer.Option(help="Cut all rows before these units, such as 47,86,125.")] = None,
    units: Annotated[str | None, typer.Option(help="Units to cut between: blocks or layers. (default layers)")] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            help="File of the profile of the units: read if it exists, else written; of micro-batches of 16, FILE-b16."
        ),
    ] = None,
    micro_batches: Annotated[
        str | None, typer.Option(help="Numbers of micro-batches to try, such as 4,8. (default K, 2K and 4K)")
    ] = None,
    repetitions: Annotated[int, typer.Option(help="Number of rounds. Each round times every row once.")] = 3,
    batches: Annotated[int, typer.Option(help="Batches timed per round.")] = 8,
    budget_minutes: Annotated[
        float | None,
        typer.Option(
            help="Time limit in minutes: plans cuts in a third of it, times fewer batches, and after the first round "
            "starts none that would exceed it."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the records; repeated, the command adds to them. (default runs/bench-MODEL-b-K)"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON, and no progress.")] = False,
    until_loss: Annotated[
        float | None,
        typer.Option(
            help="Train every row on data until this validation loss, with three learning rates each, and report time "
            "and samples.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    until_error: Annotated[
        float | None,
        typer.Option(help="The same until this validation error, in percent.", rich_help_panel=TRAINING),
    ] = None,
    samples: Annotated[
        int, typer.Option(help="Training samples after which a run ends.", rich_help_panel=TRAINING)
    ] = 100_000,
    every: Annotated[
        int | None,
        typer.Option(
            help="Updates between two validations. (default: 50 validations per run)", rich_help_panel=TRAINING
        ),
    ] = None,
    validation_samples: Annotated[
        int, typer.Option(help="Test samples of a validation.", rich_help_panel=TRAINING)
    ] = 2000,
    data: Annotated[
        str | None,
        typer.Option(
            help="Data set: cifar10, cifar100, imagefolder, digits, synthetic or text. (default cifar10; for gpt text)",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    data_dir: Annotated[
        str | None,
        typer.Option(
            help="Folder or archive of the data; of text, a file or a folder of text files. (default as in train)",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            help="Optimizer of all rows. (default sgd; for text adamw and muon)",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Seed of initial weights and order of samples.", rich_help_panel=TRAINING)
    ] = 0,
) -> None:
    """Time BP, torch.distributed.pipelining, DDP and Offbeat's methods in interleaved rounds.

    Rows whose stages compute on as many samples, of a batch or of a micro-batch, have the same cuts, planned for these.

    With --until-loss or --until-error, train them on data until that loss or error instead. Under torchrun with K
    processes, on one or several machines, each process has one worker.
    """
    if context.invoked_subcommand:
        return
    if joined_group() and os.environ["RANK"] != "0":
        from offbeat.studies.bench import machines

        return machines.serve()
    trains = until_loss is not None or until_error is not None
    _refuse_options_of_the_other_benchmark(context, trains=trains)
    shared = dict[str, Any](
        model=model,
        batch_size=batch_size,
        batch_per_update=batch_per_update,
        K=K,
        M=M,
        methods=tuple(method or ()),
        shape=numbers(shape, int, "--shape", ",x"),
        device=device,
        precision=precision,
        partition=partition,
        cuts=numbers(cuts, int, "--cuts"),
        units=units,
        profile=profile,
        micro_batches=numbers(micro_batches, int, "--micro-batches"),
        minutes=budget_minutes,
        out=out,
    )
    if against is not None:
        shared["against"] = against
    if trains:
        from offbeat.report import until_table
        from offbeat.studies.bench import until

        training = until.UntilRequest(
            **shared,
            until_loss=until_loss,
            until_error=until_error,
            samples=samples,
            every=every,
            validation_samples=validation_samples,
            data=data,
            data_dir=data_dir,
            optimizer=optimizer,
            seed=seed,
        )
        found, folder = until.until(training, show=not as_json)
        show = until_table.show
    else:
        from offbeat.report import bench_table
        from offbeat.studies.bench import rounds

        request = rounds.BenchRequest(**shared, repetitions=repetitions, batches=batches)
        found, folder = rounds.bench(request, show=not as_json)
        show = bench_table.show
    if as_json:
        print(json.dumps(found))
    else:
        show(found, str(folder))


def _refuse_options_of_the_other_benchmark(context: typer.Context, *, trains: bool) -> None:
    for name in TIMED_ONLY if trains else TRAINED_ONLY:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            if trains:
                raise UserError(f"{option} with --until-loss or --until-error: it is for timed rounds, leave it out")
            raise UserError(f"{option} without --until-loss or --until-error: add one of them, or leave it out")


@benches.command("scaling")
def bench_scaling(
    model: Annotated[str, typer.Option(help="Network for the sweep over K.")] = "resnet110",
    batch_size: Annotated[int, typer.Option(help="Samples per batch.")] = 32,
    K: Annotated[int, typer.Option("-K", help="Number of stages in the sweeps over batch size and depth.")] = 4,
    method: Annotated[str, typer.Option(help="Training method, with settings as in adl:M=2,corrector=sc.")] = "adl",
    M: Annotated[
        int | None, typer.Option("-M", help="Gradients accumulated per update. (default: the method's)")
    ] = None,
    stages: Annotated[
        str, typer.Option(help="Values of K to measure, as far as there are K cores per replica. Others are simulated.")
    ] = "1,2,3,4,6,8,12,16",
    replicas: Annotated[str, typer.Option(help="Numbers of replicas to measure, with all values of K.")] = "1,2,3,4",
    batch_sizes: Annotated[str, typer.Option(help="Batch sizes to measure.")] = "16,64,128",
    depths: Annotated[str, typer.Option(help="Networks to measure.")] = (
        "resnet20,resnet56,resnet110,resnet164,resnet1202"
    ),
    most_stages: Annotated[int, typer.Option(help="Largest K in the simulated sweep.")] = 256,
    repetitions: Annotated[int, typer.Option(help="Repetitions per point.")] = 3,
    batches: Annotated[int, typer.Option(help="Batches timed per repetition, in whole windows of M.")] = 4,
    budget_minutes: Annotated[
        float | None, typer.Option(help="Time limit in minutes: starts no point that would exceed it.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the record; repeated, the command adds to it. (default runs/scaling-MODEL-b)"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON, and no progress.")] = False,
) -> None:
    """Measure how time, memory and staleness scale with K, replicas, batch size and depth, next to predictions.

    The clock simulates what needs more cores, on published link speeds: up to 256 stages, or 64 stages of 64 replicas.
    """
    from offbeat.studies.bench import scaling

    request = scaling.ScalingRequest(
        model=model,
        batch_size=batch_size,
        K=K,
        method=method,
        M=M,
        stages=numbers(stages, int, "--stages") or (),
        replicas=numbers(replicas, int, "--replicas") or (),
        batch_sizes=numbers(batch_sizes, int, "--batch-sizes") or (),
        depths=tuple(filter(None, depths.split(","))),
        most_stages=most_stages,
        repetitions=repetitions,
        batches=batches,
        minutes=budget_minutes,
        out=out,
    )
    found, folder = scaling.scaling(request, show=not as_json)
    if as_json:
        print(json.dumps(found))
    else:
        scaling.show(found, str(folder))
