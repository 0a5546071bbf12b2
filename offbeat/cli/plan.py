"""offbeat plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offbeat.cli.app import app
from offbeat.cli.options import numbers
from offbeat.errors import UserError


@app.command()
def plan(
    model: Annotated[str, typer.Option(help="Network; see 'offbeat models'.")] = "resnet56",
    method: Annotated[str, typer.Option(help="A method, with settings as in adl:M=4,corrector=sc; or all.")] = "adl",
    K: Annotated[int, typer.Option("-K", help="Stages.")] = 4,
    M: Annotated[int | None, typer.Option("-M", help="Gradients per update.")] = None,
    batch_size: Annotated[int, typer.Option(help="Samples per batch.")] = 32,
    shape: Annotated[str | None, typer.Option(help="C,H,W of a sample. (default the network's)")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda: where the units are measured.")] = "cpu",
    threads: Annotated[int, typer.Option(help="Threads of each worker.")] = 1,
    partition: Annotated[str, typer.Option(help="Balance measured time, or flops.")] = "measured",
    speeds: Annotated[str | None, typer.Option(help="Speeds of the K workers, such as 1,1,0.5.")] = None,
    memory_limit: Annotated[float | None, typer.Option(help="Megabytes a worker may use.")] = None,
    pin: Annotated[str | None, typer.Option(help="Cuts that must be among the chosen.")] = None,
    latency: Annotated[float | None, typer.Option(help="Latency of a message in milliseconds. (default 0.1)")] = None,
    bandwidth: Annotated[float | None, typer.Option(help="Megabytes per second of a link. (default 2000)")] = None,
    measure_links: Annotated[
        bool, typer.Option("--measure-links", help="Measure latency and bandwidth, where not given, on this machine.")
    ] = False,
    profile: Annotated[Path | None, typer.Option(help="Where the units' profile is kept, and read if there.")] = None,
    max_staleness: Annotated[float | None, typer.Option(help="Advise the smallest M for this mean staleness.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the timeline: .svg, .png or .txt.")] = None,
    staleness_picture: Annotated[Path | None, typer.Option(help="Draw staleness against M.")] = None,
    theory: Annotated[bool, typer.Option("--theory", help="How the convergence bounds move with M.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Cut a network where it balances, and show what will happen before it runs."""
    from typing import get_args

    from offbeat.errors import unknown
    from offbeat.partitioning import By
    from offbeat.runs.build import shape_of
    from offbeat.studies.planning import show_plan

    if partition not in get_args(By):
        raise unknown("partition", partition, get_args(By))
    if not (0 <= (latency or 0.0) < float("inf") and (bandwidth is None or bandwidth > 0)):
        given = {name: value for name, value in (("latency", latency), ("bandwidth", bandwidth)) if value is not None}
        told = ", ".join(f"{name} {value}" for name, value in given.items())
        raise UserError(f"{told}: give milliseconds from 0 up, and megabytes per second above 0")
    sizes = shape_of(numbers(shape, int, "--shape", ",x"))
    show_plan(
        model=model,
        method=method,
        K=K,
        M=M,
        batch_size=batch_size,
        shape=sizes,
        device=device,
        threads=threads,
        by=partition,
        speeds=numbers(speeds, float, "--speeds"),
        memory_limit=None if memory_limit is None else memory_limit * 1e6,
        pinned=numbers(pin, int, "--pin") or (),
        latency=None if latency is None else latency / 1e3,
        bandwidth=None if bandwidth is None else bandwidth * 1e6,
        measure=measure_links,
        profile_file=profile,
        max_staleness=max_staleness,
        picture=picture,
        staleness_picture=staleness_picture,
        theory=theory,
        as_json=as_json,
    )
