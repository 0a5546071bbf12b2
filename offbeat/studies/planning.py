"""`offbeat plan`: profile a network, cut it, and print what will happen."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from offbeat import models
from offbeat.errors import UserError, first_line, unknown
from offbeat.method import Method
from offbeat.methods import DECLARED, METHODS, add_packages, parsed, with_settings
from offbeat.partitioning import Profile
from offbeat.partitioning.loopback import measure_links
from offbeat.report.draw import by_the_way, draw_staleness, draw_timeline
from offbeat.runs.provenance import provenance
from offbeat.studies.plan import LinkCost, Measured, Plan, make_plan
from offbeat.theory import bound_table

EVERY, DEFAULT = ("all",), "adl"  # the speed-up of every method is printed in any case; the stages are those of one


def chosen_method(text: str, M: int | None) -> Method:
    """A declared method, with the settings of the text and M where it was given."""
    name = text.partition(":")[0].strip()
    if name not in DECLARED:
        add_packages()
    if name not in DECLARED:
        raise unknown("method", name, DECLARED)
    if name in METHODS:
        return with_settings(*parsed(text, M=M))
    if M is not None or name != text:
        raise UserError(f"{name} has no settings (given: {text if M is None else f'M={M}'}): leave them out")
    return DECLARED[name]()


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The options of `offbeat plan`, in seconds and bytes."""

    model: str
    method: str
    K: int
    M: int | None
    batch_size: int
    shape: tuple[int, ...] | None
    device: str
    threads: int
    by: Any
    speeds: tuple[float, ...] | None
    memory_limit: float | None
    pinned: tuple[int, ...]
    latency: float | None
    bandwidth: float | None
    measure_links: bool
    profile_file: Path | None
    max_staleness: float | None
    picture: Path | None
    staleness_picture: Path | None
    theory: bool
    as_json: bool

    def check(self) -> None:
        for name, number in (("K", self.K), ("batch_size", self.batch_size), ("threads", self.threads)):
            if number < 1:
                raise UserError(f"{name}={number}: use a whole number from 1 up")
        file = self.profile_file
        if file and (file.is_dir() or not file.resolve().parent.is_dir()):
            raise UserError(f"profile_file={str(file)!r}: give a file in a folder that exists")


def show_plan(request: PlanRequest) -> None:
    """Everything that the command prints and draws."""
    method = chosen_method(DEFAULT if request.method in EVERY else request.method, request.M)
    request.check()
    method.check(request.K)
    measured = measure(request)
    link = link_cost(request.latency, request.bandwidth, measured=request.measure_links)
    plan, costs = make_plan(
        measured,
        method,
        request.K,
        by=request.by,
        link=link,
        speeds=request.speeds,
        memory_limit=request.memory_limit,
        pinned=request.pinned,
        max_staleness=request.max_staleness,
    )
    if request.picture:
        by_the_way(lambda path: draw_timeline(method, costs, path), request.picture)
    if request.staleness_picture:
        by_the_way(
            lambda path: draw_staleness(lambda M: replace(method.after_warmup, M=M), request.K, path),
            request.staleness_picture,
        )
    if request.as_json:
        print(json.dumps({**plan.as_dict(), **origin()}))
        return
    console = Console(highlight=False)
    console.print(stage_table(plan))
    console.print(method_table(plan))
    source = "measured" if request.measure_links else "assumed unless given"
    links = f"messages take {1e3 * link.latency:.3g} ms and {link.bandwidth / 1e6:,.0f} MB/s, {source}"
    for line in (*plan.advice, links, *plan.notes):
        console.print(f"- {line}", soft_wrap=True)
    if request.theory:
        console.print(theory_table(plan))


def measure(request: PlanRequest) -> Measured:
    """The network's units, timed here; or as the profile file has them, which is written where there is none."""
    file = request.profile_file
    known = Profile.load(file) if file and file.exists() else None
    torch.set_num_threads(request.threads)
    torch.manual_seed(0)
    size, classes = models.default_size(request.model, shape=request.shape)
    network = models.build(request.model, shape=size, classes=classes)
    try:
        if request.device == "meta":
            raise RuntimeError("it computes nothing")
        network = network.to(request.device)
        sample = models.random_batch(request.batch_size, size, classes, device=request.device)
    except (RuntimeError, AssertionError, MemoryError, OverflowError) as error:
        raise UserError(
            f"device={request.device!r} cannot hold a batch of {request.batch_size} ({first_line(error)}): use cpu, or "
            "cuda, or a smaller batch_size="
        ) from error
    measured = Measured.of(request.model, network, sample, request.batch_size, known=known)
    if file and known is None:
        measured.profile.save(file)
    return measured


def origin() -> dict[str, Any]:
    """Where a plan comes from, as in run records: its times hold for this hardware and these versions."""
    made = provenance()
    return {
        "commit": made["commit"],
        "torch": made["versions"]["torch"],
        "hardware": made["machine"],
        "command": made["command"],
    }


def link_cost(latency: float | None, bandwidth: float | None, *, measured: bool) -> LinkCost:
    """What is given (seconds, bytes per second), else what is measured if `measured`, else the defaults."""
    found = LinkCost(*measure_links()) if measured and (latency is None or bandwidth is None) else LinkCost()
    return LinkCost(found.latency if latency is None else latency, found.bandwidth if bandwidth is None else bandwidth)


def stage_table(plan: Plan) -> Table:
    bound = f"{plan.balance:.3f} of at most {plan.balance_bound:.3f} (largest unit)"
    table = Table(
        title=f"{plan.model}, {plan.method}, K={plan.K}, M={plan.M}, b={plan.batch_size}",
        box=box.SIMPLE_HEAD,
        caption=f"balance (mean / slowest stage) {bound}; mean staleness in updates",
        padding=(0, 0, 0, 1),
    )
    table.add_column("k", no_wrap=True)
    table.add_column("units", no_wrap=True)
    table.add_column("from", no_wrap=True, overflow="ellipsis", max_width=9)
    for column in ("params", "F ms", "B ms", "kB\nup", "in\nflight", "ver-\nsions", "MB", "LoS"):
        table.add_column(column, justify="right", no_wrap=True)
    for stage in plan.stages:
        start, end, first, _ = stage.units
        table.add_row(
            str(stage.k),
            f"{start}-{end}",
            first,
            f"{stage.params:,}",
            f"{stage.forward_ms:.1f}",
            f"{stage.backward_ms:.1f}",
            f"{stage.boundary_bytes / 1e3:,.0f}",
            str(stage.in_flight),
            str(stage.versions),
            f"{stage.memory_bytes / 1e6:,.0f}",
            f"{stage.mean_staleness:.2f}",
        )
    return table


def method_table(plan: Plan) -> Table:
    table = Table(title="predicted speed-up over BP on one worker, steady state", box=box.SIMPLE_HEAD)
    table.add_column("method")
    table.add_column("speed-up", justify="right")
    for name, value in plan.methods.items():
        table.add_row(name, f"{value:.2f}")
    return table


def theory_table(plan: Plan) -> Table:
    """The bound on the mean squared gradient by K and M, as the paper states it and as corrected."""
    depths = sorted({max(1, plan.K // 2), plan.K, 2 * plan.K})
    rows = bound_table(step=0.001, batches=100_000, Delta=1.0, A=1.0, L=1.0, K=depths, M=[1, 2, 4, 8, 16])
    table = Table(
        title="upper bounds on the mean squared gradient, linear learning-rate rule",
        box=box.SIMPLE_HEAD,
        caption="A = L = Delta = 1, 100,000 batches, step 0.001 per batch; corrected: smooth, squared staleness",
    )
    for column in ("K", "M", "mean staleness, all stages", "staleness term", "as corrected", "as stated"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            str(row.K),
            str(row.M),
            f"{row.mean_staleness:.2f}",
            f"{row.staleness:.2e}",
            f"{row.corrected:.5f}",
            f"{row.stated:.5f}",
        )
    return table
