"""The stages of one run: staleness, timeline, idle time, memory, drift of the weights, and the partition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from altair import LayerChart

from offbeat.errors import UserError
from offbeat.report.charts import Axis, Bar, Box, Line, bars, lanes, lines, shares
from offbeat.report.cuts import CutStage, parts
from offbeat.report.formatting import size
from offbeat.report.read import DiagnosisLine, RunRecord
from offbeat.report.sections import Drawing, Section, charts, missing, table
from offbeat.report.style import colour, shade
from offbeat.report.traces import Trace, costs_from_shares, planned, planned_idle, usable
from offbeat.runs.recipe import Recipe
from offbeat.runs.record import share_of_decrease

TRACE, DIAGNOSE = "--trace 200", "--diagnose 50"


def stage_sections(run: RunRecord, name: str) -> list[Section]:
    """What is known of the stages of a run; the names of its charts begin with `name`."""
    made, why = _parts(run)
    return [
        partition(run, name, made, why),
        stage_by_stage(run, name),
        timelines(run, name, made),
        drift(run, name),
    ]


def _parts(run: RunRecord) -> tuple[list[CutStage] | None, str]:
    if run.recipe is None:
        return None, "the recipe is not known"
    try:
        return parts(run.recipe), ""
    except UserError as error:
        return None, str(error)


# ---- the partition


def partition(run: RunRecord, name: str, made: list[CutStage] | None, why: str) -> Section:
    section = Section(
        "Partition", "Where the network is cut, and what each stage has of it. The slowest stage sets the pace of all."
    )
    if made is None:
        return section.add(missing(f"not known: {why}"))
    rows: list[tuple[str, Sequence[float]]] = [
        ("parameters", [part.parameters for part in made]),
        ("FLOPs", [part.flops for part in made]),
    ]
    times = _times(run.trace) if run.trace and len(made) == run.trace.K else None
    if times:
        rows.append(("time", times))
    shown = [row for row in rows if sum(row[1]) > 0]
    caption = "" if times else f"Time is not among them: train with `{TRACE}`."
    section.add(charts(Drawing(f"{name}-partition", "Share of each stage", shares(shown), caption)))

    def percent(values: Sequence[float], k: int) -> str:
        return f"{100 * values[k] / sum(values):.1f} %" if sum(values) else "-"

    lines = [
        {
            "stage": f"{k + 1}",
            "units": f"{part.units}",
            "from": part.first,
            "to": part.last,
            "parameters": f"{part.parameters:,}",
            "share": percent(rows[0][1], k),
            "FLOPs per sample": f"{part.flops:,}",
            "share of FLOPs": percent(rows[1][1], k),
            **({"share of time": percent(times, k)} if times else {}),
        }
        for k, part in enumerate(made)
    ]
    return section.add(table(lines, names=("from", "to")))


def _times(trace: Trace) -> list[float] | None:
    """Seconds per batch of each stage, as recorded."""
    found = [trace.seconds(k, "forward") + trace.seconds(k, "backward") for k in range(1, trace.K + 1)]
    return found if all(found) else None


# ---- stage by stage


def stage_by_stage(run: RunRecord, name: str) -> Section:
    """Staleness, memory and idle time, where they are known."""
    made = {"staleness": _staleness(run, name), "memory": _memory(run, name), "idle time": _idle(run, name)}
    section = Section("Stage by stage").add(charts(*(drawing for drawing in made.values() if drawing)))
    unknown = [what for what in ("staleness", "memory") if made[what] is None]
    if unknown:
        section.add(missing(f"no {' or '.join(unknown)} recorded yet: the first epoch of this run is not complete"))
    if made["idle time"] is None:
        section.add(missing(f"no idle time: train with `{TRACE}`"))
    return section


def _staleness(run: RunRecord, name: str) -> Drawing | None:
    if run.staleness is None:
        return None
    formula = run.formula
    drawn = [
        Bar(f"stage {k}", value, f"{value:.2f}", "measured", mark=formula[k - 1] if formula else None)
        for k, value in enumerate(run.staleness, start=1)
    ]
    off = max(abs(value - wanted) for value, wanted in zip(run.staleness, formula or run.staleness, strict=True))
    caption = "Updates between the forward and the backward of a batch, counted during training"
    caption += f"; within {max(off, 0.001):.3f} of the formula." if formula else "."
    chart = bars(drawn, title="updates", groups={"measured": colour(0)}, mark="formula" if formula else "", form=".4f")
    return Drawing(f"{name}-staleness", "Mean staleness", chart, caption, 3)


def _memory(run: RunRecord, name: str) -> Drawing | None:
    if run.memory is None:
        return None
    drawn = [Bar(f"stage {k}", value / 1e6, size(value)) for k, value in enumerate(run.memory, start=1)]
    caption = (
        f"{size(sum(run.memory))} in all: weights and their versions, gradients, optimizer state, batches in flight; "
        "not an operation's temporaries."
    )
    return Drawing(f"{name}-memory", "Peak memory", bars(drawn, title="MB"), caption, 3)


def _idle(run: RunRecord, name: str) -> Drawing | None:
    if run.trace is None:
        return None
    trace, plan = run.trace, None
    if run.recipe is not None and run.recipe.K == trace.K:
        method = run.recipe.make_method()
        costs = trace.costs(method)
        plan = planned_idle(planned(method, costs, turns=8 * trace.K)) if usable(costs) else None
    drawn = [
        Bar(f"stage {k}", share, f"{100 * share:.1f} %", "recorded", mark=plan[k - 1] if plan else None)
        for k, share in enumerate(trace.idle(), start=1)
        if share is not None
    ]
    chart = bars(
        drawn, title="share of the time", groups={"recorded": colour(0)}, mark="planned" if plan else "", whole=1.0
    )
    return Drawing(f"{name}-idle", "Idle time", chart, "Share of the recorded time in which a stage did no work.", 3)


# ---- time


def timelines(run: RunRecord, name: str, made: list[CutStage] | None) -> Section:
    section = Section(
        "Timeline",
        "What every stage does when; stage 1, the input, is at the bottom, so forwards climb and backwards descend.",
    )
    recipe = run.recipe
    if run.trace is None:
        section.add(missing(f"no trace: train with `{TRACE}` to see what happened next to the plan"))
        if recipe is not None:
            _plan_alone(section, recipe, name, made)
        return section
    trace = run.trace
    turns = turns_of(trace.K)
    cut = trace.excerpt(turns)
    caption = (
        "A typical stretch: of all with this many turns, the one of median length. A number is a batch, blank is idle; "
        "the whole trace.json opens in `ui.perfetto.dev`."
    )
    section.add(charts(Drawing(f"{name}-timeline", "As recorded", _lanes(cut, cut.length, 1e-3, "ms"), caption)))
    if recipe is None or trace.K != recipe.K:
        return section.add(missing("no plan next to it: the trace has another number of stages than the recipe"))
    method = recipe.make_method()
    costs = trace.costs(method)
    if not usable(costs):
        return section.add(missing("no plan next to it: the trace has no forward or backward of some stage"))
    first = next((one.batch for one in sorted(cut.of(1, "forward"), key=lambda one: one.start)), None)
    plan = planned(method, costs, turns=turns, length=cut.length, first=first)
    caption = (
        "The same stretch of time by the clock: the recorded median of each operation, each as soon as its message is "
        "there, in steady state, messages without delay."
    )
    section.add(charts(Drawing(f"{name}-plan", "As planned", _lanes(plan, cut.length, 1e-3, "ms"), caption)))
    if recipe.engine == "simulate" and recipe.K > 1:
        section.add(
            missing(
                "This run simulated its stages: they took turns in one process, so they wait for each other "
                "where the plan has them work. With `--engine processes` they run at the same time."
            )
        )
    return section


def _lanes(trace: Trace, length: float, scale: float, unit: str) -> LayerChart:
    drawn = [Box(one.k, one.kind, one.start / scale, one.end / scale, one.batch) for one in trace.intervals]
    return lanes(drawn, K=trace.K, unit=unit, length=length / scale)


def turns_of(K: int) -> int:
    """How many turns of a stage a timeline shows."""
    return min(16, max(6, 2 * K))


def _plan_alone(section: Section, recipe: Recipe, name: str, made: list[CutStage] | None) -> None:
    known = made is not None and all(part.flops > 0 for part in made)
    costs = costs_from_shares([part.flops for part in made] if made and known else [1.0] * recipe.K)
    plan = planned(recipe.make_method(), costs, turns=turns_of(recipe.K))
    by = "forwards by their FLOPs" if known else "equal stages"
    caption = f"By the clock, in steady state: {by}, B = 2F, messages without delay."
    chart = _lanes(plan, plan.length, 1.0, "F, the mean forward of a stage")
    section.add(charts(Drawing(f"{name}-plan", "As planned", chart, caption)))


# ---- drift


def drift(run: RunRecord, name: str) -> Section:
    section = Section(
        "Drift",
        "What staleness does to a gradient: how far the weights move while a batch is in flight, how close its "
        "gradient is to the direction of a fresh one, and what that costs each stage.",
    )
    if not run.diagnosis:
        return section.add(missing(f"no diagnosis: train with `{DIAGNOSE}`"))

    def gap(line: DiagnosisLine) -> float:
        return 100 * line.gap / line.norm if line.norm else 0.0

    drawn = (
        (
            "gap",
            "Parameter gap",
            "Distance of the weights now from those that forwarded the batch, in % of their norm.",
            Axis("gap, %", log=None, format=".3~r"),
            gap,
        ),
        (
            "gradient",
            "Gradient norm",
            "L2 norm of the late gradient.",
            Axis("norm", log=None, format=".3~r"),
            lambda line: line.gradient,
        ),
        (
            "cosine",
            "Late against fresh gradients",
            "Cosine of the late gradient and a fresh one of the same batch; 1 is the same direction.",
            Axis("cosine", format=".3f"),
            lambda line: line.cosine,
        ),
    )
    cost = _cost(run, name)
    made = [
        Drawing(f"{name}-{what}", title, _by_update(run, axis, value), caption, 2 if cost else 3)
        for what, title, caption, axis, value in drawn
    ]
    if cost is None:
        return section.add(
            charts(*made), missing(f"what staleness costs each stage is not recorded: train with `{DIAGNOSE}` again")
        )
    return section.add(charts(*made, cost))


def _cost(run: RunRecord, name: str) -> Drawing | None:
    """The decrease of the loss that each stage predicts and does not get, summed over the measured updates."""
    stages = sorted({line.stage for line in run.diagnosis if line.changes})
    if not stages:
        return None
    drawn = []
    for k in stages:
        known = [(line.update, line.lag, line.changes) for line in run.diagnosis if line.stage == k and line.changes]
        measured = sorted(known)
        lost = accumulate(fresh - predicted for *_, (predicted, fresh) in measured)
        share = share_of_decrease((lag, changes) for _, lag, changes in measured)
        drawn.append(
            Line(
                f"stage {k}",
                [(float(update), value) for (update, *_), value in zip(measured, lost, strict=True)],
                end="" if share is None else f"{100 * share:.0f} %",
                colour=shade(k, stages[-1]),
            )
        )
    caption = (
        "Decrease of the loss that the late gradients of a stage predict for its updates and fresh gradients do not, "
        "summed over the measured updates. In the legend: the share of the predicted decrease that the stage gets, "
        "from its first late update on."
    )
    chart = lines(drawn, x=Axis("update", whole=True), y=Axis("lost decrease", zero=True, format=".3~r"), height=220)
    return Drawing(f"{name}-cost", "What staleness costs each stage", chart, caption, 2)


def _by_update(run: RunRecord, axis: Axis, value: Callable[[DiagnosisLine], float]) -> LayerChart:
    """A line for each stage over the updates, the first stage in full colour and the later ones fainter."""
    stages = sorted({line.stage for line in run.diagnosis})
    drawn = [
        Line(
            f"stage {k}",
            sorted((float(line.update), value(line)) for line in run.diagnosis if line.stage == k),
            colour=shade(k, stages[-1]),
        )
        for k in stages
    ]
    return lines(drawn, x=Axis("update", whole=True), y=axis, height=220)
