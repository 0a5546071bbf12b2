"""`offbeat plan`: profile a network, cut it, and print what will happen."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.status import Status
from rich.table import Table

from offbeat import models
from offbeat.core.compression import check_messages, sent_bytes
from offbeat.correctors import AutoCorrector, as_text
from offbeat.errors import UserError, first_line, unknown
from offbeat.method import Method
from offbeat.methods import AUTO, DECLARED, METHODS, add_packages, parsed, with_settings
from offbeat.partitioning import Profile
from offbeat.partitioning.batch_times import batch_seconds, smallest_batch
from offbeat.partitioning.loopback import measure_links
from offbeat.pipeline.checks import check_replicas
from offbeat.recommended import NORMALIZED, Recommendation, correctors_by_optimizer, parsed_auto, recommend
from offbeat.report.draw import check_picture, draw_if_possible, draw_staleness, draw_timeline
from offbeat.runs.build import size_of_samples
from offbeat.runs.provenance import provenance
from offbeat.runs.recipe import make_recipe, split_update
from offbeat.studies.plan import LinkCost, Measured, Plan, make_plan, recompute_to_fit
from offbeat.studies.splits import Split, best, splits
from offbeat.theory import bound_table

EVERY, DEFAULT = ("all",), "adl"  # the speed-up of every method is printed in any case; the stages are those of one


def chosen_method(text: str, M: int | None) -> Method:
    """A declared method, with the settings of the text and M where it was given."""
    name = text.partition(":")[0].strip()
    if name not in DECLARED:
        add_packages()
    if name not in DECLARED:
        raise unknown("method", name, [AUTO, *DECLARED])
    if name in METHODS:
        return with_settings(*parsed(text, M=M))
    if M is not None or name != text:
        raise UserError(f"{name} has no settings (given: {text if M is None else f'M={M}'}): leave them out")
    return DECLARED[name]()


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The options of `offbeat plan`, in seconds and bytes."""

    model: str
    data: str | None  # whose samples and classes the network has; None: its own
    data_dir: str | None
    method: str
    K: int
    replicas: int
    workers: int | None  # to divide into stages and replicas, instead of K and replicas
    M: int | None
    batch_size: int
    batch_per_update: int | None
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
    messages: str
    profile_file: Path | None
    max_staleness: float | None
    picture: Path | None
    staleness_picture: Path | None
    theory: bool
    as_json: bool

    def check(self) -> None:
        numbers = {name: getattr(self, name) for name in ("K", "replicas", "workers", "batch_size", "threads")}
        for name, number in numbers.items():
            if number is not None and number < 1:
                raise UserError(f"{name}={number}: use a whole number from 1 up")
        if self.batch_per_update is not None and self.batch_per_update < 1:
            raise UserError(f"batch_per_update={self.batch_per_update}: use a whole number from 1 up")
        file = self.profile_file
        if file and (file.is_dir() or not file.resolve().parent.is_dir()):
            raise UserError(f"profile_file={str(file)!r}: give a file in a folder that exists")
        for picture in (self.picture, self.staleness_picture):
            if picture is not None:
                check_picture(picture)


def show_plan(request: PlanRequest) -> None:
    """Everything that the command prints and draws."""
    settings = parsed_auto(request.method, M=request.M)
    by_default = settings is not None or request.method in EVERY
    method = chosen_method(DEFAULT if by_default else request.method, request.M)
    request.check()
    if request.workers is not None:
        if by_default:
            raise UserError(f"method={request.method!r} with workers={request.workers}: name one method, such as adl")
        show_splits(request, method)
        return
    method.check(request.K)
    check_replicas(method, request.replicas)
    M = method.M if settings is None else settings.get("M", method.M)
    samples = request.batch_per_update or request.batch_size * M * request.replicas  # of an update
    if settings is None or "M" in settings:
        request = replace(request, batch_size=split_update(samples, M, request.replicas))
    link = link_cost(request)
    network = build(request)
    known_latency = request.latency is not None or request.measure_links
    of_replica = split_update(samples, 1, request.replicas)
    with timing(f"updates of {of_replica} samples in micro-batches"):
        found = recommendation(
            request, network, of_replica, {"latency": link.latency if known_latency else None, **(settings or {})}
        )
    if settings is not None:
        method, request = found.method, replace(request, batch_size=of_replica // found.M)
    measured = measure(request, network)
    with timing(f"{request.K} stages and other cuts, usually for less than a minute"):
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
            replicas=request.replicas,
        )
    if request.picture:
        drawn = recompute_to_fit(
            method,
            request.K,
            measured.profile,
            request.memory_limit,
            by=request.by,
            speeds=request.speeds,
            pinned=request.pinned,
        )
        draw_if_possible(lambda path: draw_timeline(drawn.method, costs, path), request.picture)
    if request.staleness_picture:
        draw_if_possible(
            lambda path: draw_staleness(lambda M: replace(method.after_warmup, M=M), request.K, path),
            request.staleness_picture,
        )
    if request.as_json:
        print(json.dumps({**plan.as_dict(), "recommendation": as_record(found, samples), **origin()}))
        return
    console = Console(highlight=False)
    print_stages(plan, console)
    console.print(method_table(plan))
    if found.measured:
        console.print(recommendation_table(found))
    links = link_line(request, link)
    advised = recommendation_lines(found, method, request.K, samples)
    slowest = max(stage.sum_ms for stage in plan.stages)
    summed = [f"adding the gradients of {plan.replicas} replicas takes {slowest:.3g} ms per update at most"]
    for line in (
        *timing_lines(plan),
        *plan.advice,
        *advised,
        links,
        *(summed if plan.replicas > 1 else ()),
        *plan.notes,
    ):
        console.print(f"- {line}", soft_wrap=True)
    if request.theory:
        console.print(theory_table(plan))


def timing(what: str) -> Status:
    """A line on stderr while this is timed, if that is a terminal."""
    return Console(stderr=True, highlight=False).status(f"timing {what}")


def link_line(request: PlanRequest, link: LinkCost) -> str:
    source = "measured" if request.measure_links else "assumed unless given"
    line = f"messages take {1e3 * link.latency:.3g} ms and {link.bandwidth / 1e6:,.0f} MB/s, {source}"
    if link.messages == "exact":
        return line
    share = sent_bytes(100, link.messages)
    return f"{line}; {link.messages} sends {share:.0f} % of the bytes of float32, and encoding is not part of the time"


def show_splits(request: PlanRequest, method: Method) -> None:
    """Every division of the workers into stages and replicas, and the fastest."""
    assert request.workers is not None
    link = link_cost(request)
    found = splits(
        measure(request, build(request)),
        method,
        request.workers,
        link=link,
        memory_limit=request.memory_limit,
        max_staleness=request.max_staleness,
    )
    chosen = best(found)
    if request.as_json:
        rows = [split.as_dict() for split in found]
        print(json.dumps({"workers": request.workers, "splits": rows, "best": chosen.as_dict(), **origin()}))
        return
    console = Console(highlight=False)
    console.print(split_table(request, method, found, chosen))
    console.print(
        f"- fastest: {options_of(chosen, request.method)}; 'offbeat plan' with these in place of --workers "
        f"{request.workers} measures its stages",
        soft_wrap=True,
    )
    console.print(f"- {link_line(request, link)}", soft_wrap=True)
    for split in found:
        if split.reason:
            console.print(f"- K={split.K}, replicas={split.replicas} is not possible: {split.reason}", soft_wrap=True)


def options_of(split: Split, method: str) -> str:
    """The options of a division; with those of the method, given as text, where stages recompute.

    >>> options_of(Split(4, 2, 1, samples_per_update=64, recompute="1+2"), "adl:corrector=sc")
    '-K 4 --replicas 2 -M 1 --method adl:corrector=sc,recompute=1+2 (these stages repeat forwards)'
    """
    options = f"-K {split.K} --replicas {split.replicas} -M {split.M}"
    if not split.recompute:
        return options
    settings = f"{method}{',' if ':' in method else ':'}recompute={split.recompute}"
    return f"{options} --method {settings} (these stages repeat forwards)"


def split_table(request: PlanRequest, method: Method, found: Sequence[Split], chosen: Split) -> Table:
    table = Table(
        title=f"{request.model}, {method.name}, {request.workers} workers, b={request.batch_size}",
        box=box.SIMPLE_HEAD,
        caption="speed-up over BP on one worker, predicted from the profile of the units; LoS: mean staleness of "
        "stage 1 in updates; MB: of a worker",
    )
    for column in ("K", "replicas", "M", "samples\nper update", "LoS", "MB", "speed-up", ""):
        table.add_column(column, justify="right")
    for split in found:
        figures = ["-"] * 3
        if split.speedup is not None and split.memory_bytes is not None:
            figures = [f"{split.staleness:.2f}", f"{split.memory_bytes / 1e6:,.0f}", f"{split.speedup:.2f}"]
        row = (str(split.K), str(split.replicas), str(split.M), f"{split.samples_per_update:,}", *figures)
        marks = ["fastest"] * (split is chosen) + ["recompute"] * bool(split.recompute)
        table.add_row(*row, ", ".join(marks))
    return table


@dataclass(frozen=True)
class PlannedNetwork:
    """A network on its device, with what its batches are made of."""

    module: torch.nn.Module
    shape: tuple[int, ...]
    classes: int

    def batch(self, samples: int, device: str) -> torch.Tensor:
        return models.random_batch(samples, self.shape, self.classes, device=device)


def size(request: PlanRequest) -> tuple[tuple[int, ...], int]:
    """Shape of a sample and number of classes: of the data if some is given, otherwise of the network."""
    if request.data is None:
        return models.default_size(request.model, shape=request.shape)
    return size_of_samples(
        make_recipe(model=request.model, data=request.data, data_dir=request.data_dir, shape=request.shape)
    )


def build(request: PlanRequest) -> PlannedNetwork:
    """The network on the device; UserError if that cannot hold it, and a batch."""
    torch.set_num_threads(request.threads)
    torch.manual_seed(0)
    shape, classes = size(request)
    module = models.build(request.model, shape=shape, classes=classes)
    try:
        if request.device == "meta":
            raise RuntimeError("it computes nothing")
        network = PlannedNetwork(module.to(request.device), shape, classes)
        network.batch(request.batch_size, request.device)
    except (RuntimeError, AssertionError, MemoryError, OverflowError) as error:
        raise UserError(
            f"device={request.device!r} cannot hold a batch of {request.batch_size} ({first_line(error)}): use cpu, or "
            "cuda, or a smaller batch_size="
        ) from error
    return network


def measure(request: PlanRequest, network: PlannedNetwork) -> Measured:
    """The network's units, timed here; or as the profile file has them, which is written where there is none."""
    file = request.profile_file
    known = Profile.load(file) if file and file.exists() else None
    sample = network.batch(request.batch_size, request.device)
    with timing(f"the units of {request.model}"):
        measured = Measured.of(request.model, network.module, sample, request.batch_size, known=known)
    if file and known is None:
        measured.profile.save(file)
    return measured


def recommendation(
    request: PlanRequest, network: PlannedNetwork, samples: int, settings: Mapping[str, Any]
) -> Recommendation:
    """What method auto would be for updates of that many samples, measured here."""
    sample, device = network.batch(1, request.device), torch.device(request.device)
    return recommend(
        request.K,
        batch=samples,
        settings={name: value for name, value in settings.items() if value is not None},
        seconds=batch_seconds(network.module, sample, device=device),
        smallest=smallest_batch(network.module, NORMALIZED),
    )


def as_record(found: Recommendation, samples: int) -> dict[str, Any]:
    return {
        "method": found.method.name,
        "M": found.M,
        "batch_per_update": samples,
        "corrector": as_text(found.method.correctors),
        "staleness_warmup": [[method.name, updates] for method, updates in found.method.staleness_warmup],
        "measured": [asdict(row) for row in found.measured],
    }


def recommendation_lines(found: Recommendation, method: Method, K: int, samples: int) -> list[str]:
    """The recommendation; and for each kind of optimizer what corrector "auto" is in the planned method and in that."""
    lines = [f"recommended (--method auto) for updates of {samples} samples: {found.as_text()}"]
    for each in dict.fromkeys((method.after_warmup, found.method.after_warmup)):
        if AutoCorrector() in each.correctors:
            title = f"corrector auto of {each.name}, M={each.M}, with"
            lines += [f"{title} {names}: {stages}" for names, stages in correctors_by_optimizer(each, K).items()]
    return lines


def recommendation_table(found: Recommendation) -> Table:
    table = Table(title="an update in M micro-batches of b samples, forward and backward", box=box.SIMPLE_HEAD)
    for column in ("b", "M", "ms per sample", "updates that stage 1 is late", ""):
        table.add_column(column, justify="right")
    for row in found.measured:
        chosen = "recommended" if row.M == found.M else ""
        table.add_row(str(row.size), str(row.M), f"{1e3 * row.seconds:.3f}", f"{row.delay:.3g}", chosen)
    return table


def origin() -> dict[str, Any]:
    """Where a plan comes from, as in run records: its times hold for this hardware and these versions."""
    made = provenance()
    return {
        "commit": made["commit"],
        "torch": made["versions"]["torch"],
        "hardware": made["machine"],
        "command": made["command"],
    }


def link_cost(request: PlanRequest) -> LinkCost:
    """What is given (seconds, bytes per second), else what is measured if that is requested, else the defaults."""
    latency, bandwidth = request.latency, request.bandwidth
    messages = check_messages(request.messages, request.workers or request.K)
    found = LinkCost()
    if request.measure_links and (latency is None or bandwidth is None):
        here = measure_links()
        found = LinkCost(here.latency, here.bandwidth)
    return LinkCost(
        found.latency if latency is None else latency, found.bandwidth if bandwidth is None else bandwidth, messages
    )


def timing_lines(plan: Plan) -> list[str]:
    """How sure the balance is, what moving the cuts gained, and what stages lose that run at once."""
    if plan.K == 1:
        return []
    least, most = plan.balance_rounds
    lines = [f"balance {plan.balance:.3f}, in single rounds {least:.3f} to {most:.3f}"]
    if (moved := plan.refinement) and moved["tried"]:
        kept = f"{moved['kept']} of {moved['tried']} other cuts were faster when whole stages were timed"
        gained = f": balance {moved['before']['balance']:.3f} before, {moved['after']['balance']:.3f} after"
        lines.append(kept + (gained if moved["kept"] else ""))
    if plan.calibration:
        slow_down = plan.calibration["slow_down"]
        work = 1e3 * plan.calibration["work_per_message"] + 1e9 * plan.calibration["work_per_byte"]
        lines.append(
            f"the prediction is for this machine: stages take {slow_down:.2f} times as long at the same time as "
            f"one after the other, and a message of 1 MB takes {work:.2g} ms of the processor at each end"
        )
    return lines


def print_stages(plan: Plan, console: Console) -> None:
    """Print a row per stage, without the names of units if the terminal would cut numbers."""
    table = stage_table(plan)
    fits = console.measure(table, options=console.options.update(width=1000)).maximum <= console.width
    console.print(table if fits else stage_table(plan, names=False))


def stage_table(plan: Plan, *, names: bool = True) -> Table:
    replicas = f", replicas={plan.replicas}" if plan.replicas > 1 else ""
    bound = f"{plan.balance:.3f} of at most {plan.balance_bound:.3f} (largest unit)"
    repeats = "; r: inputs held, forwards repeated" if any(stage.recompute for stage in plan.stages) else ""
    table = Table(
        title=f"{plan.model}, {plan.method}, K={plan.K}{replicas}, M={plan.M}, b={plan.batch_size}",
        box=box.SIMPLE_HEAD,
        caption=f"balance (mean / slowest stage) {bound}; mean staleness in updates{repeats}",
        padding=(0, 0, 0, 1),
    )
    table.add_column("k", no_wrap=True)
    table.add_column("units", no_wrap=True)
    if names:
        table.add_column("from", no_wrap=True, overflow="ellipsis", max_width=9)
    for column in ("params", "F ms", "B ms", "kB\nup", "in\nflight", "ver-\nsions", "MB", "LoS"):
        table.add_column(column, justify="right", no_wrap=True)
    for stage in plan.stages:
        start, end, first, _ = stage.units
        table.add_row(
            str(stage.k),
            f"{start}-{end}",
            *([first] * names),
            f"{stage.params:,}",
            f"{stage.forward_ms:.1f}",
            f"{stage.backward_ms:.1f}",
            f"{stage.boundary_bytes / 1e3:,.0f}",
            f"{stage.in_flight}{'r' * stage.recompute}",
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
