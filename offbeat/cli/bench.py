"""offbeat bench, offbeat bench scaling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from offbeat.cli.app import app
from offbeat.cli.options import numbers

benches = typer.Typer(
    help="Time torch pipelining, DDP and Offbeat on the same cuts.", invoke_without_command=True, add_completion=False
)
app.add_typer(benches, name="bench")


@benches.callback()
def bench(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="Network; see 'offbeat models'.")] = "resnet110",
    batch_size: Annotated[int, typer.Option(help="Samples per batch, over all workers.")] = 128,
    K: Annotated[int, typer.Option("-K", help="Workers, and stages.")] = 4,
    M: Annotated[
        int | None, typer.Option("-M", help="Gradients per update of the methods that take M. (default 4)")
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="Settings of a method of ours, as in adl:corrector=sc; one that is not listed is timed too. Can be "
            "repeated."
        ),
    ] = None,
    against: Annotated[
        str,
        typer.Option(
            help="all, or some of bp-cores, bp-windows (GPU), torch-gpipe, torch-1f1b, torch-interleaved,"
            " ddp, adl-1f1b, ddg, fr, dsp, gpipe; bp and adl are always there."
        ),
    ] = "all",
    shape: Annotated[str | None, typer.Option(help="C,H,W of a sample. (default the network's)")] = None,
    device: Annotated[str, typer.Option(help="cpu: one core per worker; cuda: one GPU.")] = "cpu",
    precision: Annotated[str, typer.Option(help="fp32; on a GPU also tf32 or bf16.")] = "fp32",
    partition: Annotated[str, typer.Option(help="Balance measured time, or flops.")] = "measured",
    cuts: Annotated[str | None, typer.Option(help="Cut before these units instead, such as 47,86,125.")] = None,
    units: Annotated[str | None, typer.Option(help="What the cuts count: blocks or layers. (default layers)")] = None,
    profile: Annotated[Path | None, typer.Option(help="Where the units' profile is kept, and read if there.")] = None,
    micro_batches: Annotated[
        str | None, typer.Option(help="Try these numbers of micro-batches, such as 4,8. (default K, 2K and 4K)")
    ] = None,
    repetitions: Annotated[int, typer.Option(help="Rounds, each of which times every row once.")] = 3,
    batches: Annotated[int, typer.Option(help="Batches timed in a round.")] = 8,
    budget_minutes: Annotated[
        float | None, typer.Option(help="Time fewer batches, and begin no round, that would end later.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the records. (default runs/bench-MODEL-b-K)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="No progress; print the record as JSON.")] = False,
) -> None:
    """Time BP, torch's pipelining and DDP, and Offbeat's methods on the same cuts, in rounds, in one run."""
    if context.invoked_subcommand:
        return
    from offbeat.report import bench_table
    from offbeat.runs.build import shape_of
    from offbeat.studies.bench import rounds

    request = rounds.Request(
        model=model,
        batch_size=batch_size,
        K=K,
        M=M,
        methods=tuple(method or ()),
        against=against,
        shape=shape_of(numbers(shape, int, "--shape", ",x")),
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
    model: Annotated[str, typer.Option(help="Network whose stages K are changed.")] = "resnet110",
    batch_size: Annotated[int, typer.Option(help="Samples per batch.")] = 32,
    K: Annotated[int, typer.Option("-K", help="Stages where the batch or the depth changes.")] = 4,
    M: Annotated[int, typer.Option("-M", help="Gradients per update.")] = 4,
    stages: Annotated[str, typer.Option(help="K to measure, as far as there are cores.")] = "1,2,4,8,16",
    batch_sizes: Annotated[str, typer.Option(help="Batches to measure.")] = "16,64,128",
    depths: Annotated[str, typer.Option(help="Networks to measure.")] = (
        "resnet20,resnet56,resnet110,resnet164,resnet1202"
    ),
    most_stages: Annotated[int, typer.Option(help="Most stages that are simulated.")] = 256,
    repetitions: Annotated[int, typer.Option(help="Repetitions of each point.")] = 3,
    batches: Annotated[int, typer.Option(help="Batches timed in each.")] = 4,
    budget_minutes: Annotated[float | None, typer.Option(help="Begin no point that would end later.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the record. (default runs/scaling-MODEL-b)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="No progress; print the record as JSON.")] = False,
) -> None:
    """How time, memory and staleness grow with K, the batch and the depth; the clock for up to 256 stages."""
    from offbeat.studies.bench import scaling

    request = scaling.Request(
        model=model,
        batch_size=batch_size,
        K=K,
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
