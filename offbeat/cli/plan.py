"""offbeat plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offbeat.cli.app import app
from offbeat.cli.options import DATA, DATA_DIR, MODEL, SHAPE, numbers
from offbeat.errors import UserError


@app.command()
def plan(
    model: Annotated[str | None, typer.Option(help=f"{MODEL} (default resnet56; for text gpt)", metavar="NAME")] = None,
    data: Annotated[
        str | None, typer.Option(help=f"{DATA} Gives the shape of samples and the number of classes.")
    ] = None,
    data_dir: Annotated[str | None, typer.Option(help=DATA_DIR)] = None,
    method: Annotated[
        str, typer.Option(help="Training method, with settings as in adl:M=4,corrector=sc; or auto, or all.")
    ] = "adl",
    K: Annotated[int | None, typer.Option("-K", help="Number of stages. (default 4)")] = None,
    replicas: Annotated[
        int | None, typer.Option(help="Copies of all stages, whose gradients are added once per update. (default 1)")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Compare all divisions of this many workers into stages and replicas, instead of -K and --replicas; "
            "within --max-staleness (by M) and --memory-limit."
        ),
    ] = None,
    M: Annotated[int | None, typer.Option("-M", help="Gradients accumulated per update.")] = None,
    batch_size: Annotated[int, typer.Option(help="Samples per batch.")] = 32,
    batch_per_update: Annotated[
        int | None, typer.Option(help="Samples per update, split into M batches, instead of --batch-size.")
    ] = None,
    shape: Annotated[str | None, typer.Option(help=SHAPE)] = None,
    device: Annotated[str, typer.Option(help="Device on which the units are measured: cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option(help="CPU threads per worker.")] = 1,
    partition: Annotated[str, typer.Option(help="What to balance: measured time or flops.")] = "measured",
    speeds: Annotated[str | None, typer.Option(help="Relative speeds of the K workers, such as 1,1,0.5.")] = None,
    memory_limit: Annotated[float | None, typer.Option(help="Memory limit per worker in megabytes.")] = None,
    pin: Annotated[str | None, typer.Option(help="Cuts that the partition must include.")] = None,
    latency: Annotated[float | None, typer.Option(help="Latency per message in milliseconds. (default 0.1)")] = None,
    bandwidth: Annotated[
        float | None, typer.Option(help="Bandwidth of a link in megabytes per second. (default 2000)")
    ] = None,
    measure_links: Annotated[
        bool, typer.Option("--measure-links", help="Measure latency and bandwidth on this machine, unless given.")
    ] = False,
    messages: Annotated[
        str, typer.Option(help="Messages between stages: exact, bf16 or int8, as in train; sizes as of float32.")
    ] = "exact",
    profile: Annotated[
        Path | None, typer.Option(help="File of the profile of the units: read if it exists, else written.")
    ] = None,
    max_staleness: Annotated[
        float | None, typer.Option(help="Find the smallest M with at most this mean staleness.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Write the timeline as .svg, .png or .txt.")] = None,
    staleness_picture: Annotated[Path | None, typer.Option(help="Write a chart of staleness against M.")] = None,
    theory: Annotated[bool, typer.Option("--theory", help="Show how the convergence bounds depend on M.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Partition a network, and predict time, staleness and memory before training."""
    from typing import get_args

    from offbeat.errors import unknown
    from offbeat.partitioning import By
    from offbeat.runs.task import default_names
    from offbeat.studies.planning import PlanRequest, show_plan

    of_one = {
        "-K": K,
        "--replicas": replicas,
        "--batch-per-update": batch_per_update,
        "--speeds": speeds,
        "--pin": pin,
        "--picture": picture,
        "--staleness-picture": staleness_picture,
        "--theory": theory or None,
    }
    given = [option for option, value in of_one.items() if value is not None]
    if workers is not None and given:
        raise UserError(f"--workers {workers} with {', '.join(given)}: it compares divisions, leave out what is of one")
    if data_dir is not None and data is None:
        raise UserError(f"--data-dir {data_dir} without --data: name the data set as well")
    if partition not in get_args(By):
        raise unknown("partition", partition, get_args(By))
    if not (0 <= (latency or 0.0) < float("inf") and (bandwidth is None or bandwidth > 0)):
        costs = {name: value for name, value in (("latency", latency), ("bandwidth", bandwidth)) if value is not None}
        options = ", ".join(f"--{name} {value:g}" for name, value in costs.items())
        raise UserError(f"{options}: give finite milliseconds from 0 up, and megabytes per second above 0")
    if memory_limit is not None and not memory_limit > 0:
        raise UserError(f"--memory-limit {memory_limit:g}: give megabytes above 0")
    if max_staleness is not None and not max_staleness >= 0:
        raise UserError(f"--max-staleness {max_staleness:g}: give a number of updates from 0 up")
    request = PlanRequest(
        model=default_names(model, data)[0],
        data=data,
        data_dir=data_dir,
        method=method,
        K=4 if K is None else K,
        replicas=1 if replicas is None else replicas,
        workers=workers,
        M=M,
        batch_size=batch_size,
        batch_per_update=batch_per_update,
        shape=numbers(shape, int, "--shape", ",x"),
        device=device,
        threads=threads,
        by=partition,
        speeds=numbers(speeds, float, "--speeds"),
        memory_limit=None if memory_limit is None else memory_limit * 1e6,
        pinned=numbers(pin, int, "--pin") or (),
        latency=None if latency is None else latency / 1e3,
        bandwidth=None if bandwidth is None else bandwidth * 1e6,
        measure_links=measure_links,
        messages=messages,
        profile_file=profile,
        max_staleness=max_staleness,
        picture=picture,
        staleness_picture=staleness_picture,
        theory=theory,
        as_json=as_json,
    )
    show_plan(request)
