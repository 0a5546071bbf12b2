"""offbeat bench, offbeat bench scaling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from offbeat.cli.app import Application, app
from offbeat.cli.options import MODEL, SHAPE, numbers

benches = Application(
    help="Time torch.distributed.pipelining, DDP and Offbeat with the same cuts.", invoke_without_command=True
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
        int | None, typer.Option("-M", help="Gradients accumulated per update, for methods that take M. (default 4)")
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="Settings of an Offbeat method, as in adl:corrector=sc; adds the method if it is not in the table. "
            "Can be repeated."
        ),
    ] = None,
    against: Annotated[
        str,
        typer.Option(
            help="Rows to time: all, or some of bp-cores, bp-windows (GPU), torch-gpipe, torch-1f1b, torch-interleaved,"
            " ddp, adl-micro, adl-recompute, adl-1f1b, ddg, fr, dsp, gpipe. bp and adl are always included."
        ),
    ] = "all",
    shape: Annotated[str | None, typer.Option(help=SHAPE)] = None,
    device: Annotated[str, typer.Option(help="cpu (one core per worker) or cuda (one GPU).")] = "cpu",
    precision: Annotated[str, typer.Option(help="fp32, or on a GPU tf32 or bf16.")] = "fp32",
    partition: Annotated[str, typer.Option(help="What to balance: measured time or flops.")] = "measured",
    cuts: Annotated[str | None, typer.Option(help="Cut before these units, such as 47,86,125.")] = None,
    units: Annotated[str | None, typer.Option(help="Units to cut between: blocks or layers. (default layers)")] = None,
    profile: Annotated[
        Path | None, typer.Option(help="File of the profile of the units: read if it exists, else written.")
    ] = None,
    micro_batches: Annotated[
        str | None, typer.Option(help="Numbers of micro-batches to try, such as 4,8. (default K, 2K and 4K)")
    ] = None,
    repetitions: Annotated[int, typer.Option(help="Number of rounds. Each round times every row once.")] = 3,
    batches: Annotated[int, typer.Option(help="Batches timed per round.")] = 8,
    budget_minutes: Annotated[
        float | None,
        typer.Option(help="Time limit in minutes: times fewer batches, and starts no round that would exceed it."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the records; repeated, the command adds to them. (default runs/bench-MODEL-b-K)"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON, and no progress.")] = False,
) -> None:
    """Time BP, torch.distributed.pipelining, DDP and Offbeat's methods with the same cuts, in interleaved rounds."""
    if context.invoked_subcommand:
        return
    from offbeat.report import bench_table
    from offbeat.studies.bench import rounds

    request = rounds.BenchRequest(
        model=model,
        batch_size=batch_size,
        batch_per_update=batch_per_update,
        K=K,
        M=M,
        methods=tuple(method or ()),
        against=against,
        shape=numbers(shape, int, "--shape", ",x"),
        device=device,
        precision=precision,
        partition=partition,
        cuts=numbers(cuts, int, "--cuts"),
        units=units,
        profile=profile,
        micro_batches=numbers(micro_batches, int, "--micro-batches"),
        repetitions=repetitions,
        batches=batches,
        minutes=budget_minutes,
        out=out,
    )
    found, folder = rounds.bench(request, show=not as_json)
    if as_json:
        print(json.dumps(found))
    else:
        bench_table.show(found, str(folder))


@benches.command("scaling")
def bench_scaling(
    model: Annotated[str, typer.Option(help="Network for the sweep over K.")] = "resnet110",
    batch_size: Annotated[int, typer.Option(help="Samples per batch.")] = 32,
    K: Annotated[int, typer.Option("-K", help="Number of stages in the sweeps over batch size and depth.")] = 4,
    method: Annotated[str, typer.Option(help="Training method, with settings as in adl:M=2,corrector=sc.")] = "adl",
    M: Annotated[
        int | None, typer.Option("-M", help="Gradients accumulated per update. (default: the method's)")
    ] = None,
    stages: Annotated[str, typer.Option(help="Values of K to measure, up to the number of cores.")] = "1,2,4,8,16",
    batch_sizes: Annotated[str, typer.Option(help="Batch sizes to measure.")] = "16,64,128",
    depths: Annotated[str, typer.Option(help="Networks to measure.")] = (
        "resnet20,resnet56,resnet110,resnet164,resnet1202"
    ),
    most_stages: Annotated[int, typer.Option(help="Largest K in the simulated sweep.")] = 256,
    repetitions: Annotated[int, typer.Option(help="Repetitions per point.")] = 3,
    batches: Annotated[int, typer.Option(help="Batches timed per repetition.")] = 4,
    budget_minutes: Annotated[
        float | None, typer.Option(help="Time limit in minutes: starts no point that would exceed it.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the record; repeated, the command adds to it. (default runs/scaling-MODEL-b)"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON, and no progress.")] = False,
) -> None:
    """Measure how time, memory and staleness scale with K, batch size and depth; simulate up to 256 stages."""
    from offbeat.studies.bench import scaling

    request = scaling.ScalingRequest(
        model=model,
        batch_size=batch_size,
        K=K,
        method=method,
        M=M,
        stages=numbers(stages, int, "--stages") or (),
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
