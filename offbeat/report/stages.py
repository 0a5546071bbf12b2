"""The stages of one run: staleness, timeline, idle time, memory, drift of the weights, and the partition."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from offbeat.errors import UserError
from offbeat.recipe import Recipe
from offbeat.report.charts import Bar, Line, bars, lanes, lines, shares
from offbeat.report.cuts import Part, parts
from offbeat.report.folders import Diagnosis, Run
from offbeat.report.parts import Section, missing, table
from offbeat.report.svg import Canvas, Picture
from offbeat.report.traces import Trace, alike, planned, planned_idle, usable
from offbeat.report.words import size

TRACE, DIAGNOSE = "--trace 200", "--diagnose 50"


def stage_sections(run: Run, name: str) -> list[Section]:
    """All that can be said of the stages of a run; `name` begins the names of its pictures."""
    made, why = _parts(run)
    return [
        partition(run, name, made, why), stage_by_stage(run, name), timelines(run, name, made), drift(run, name),
    ]  # fmt: skip


def _parts(run: Run) -> tuple[list[Part] | None, str]:
    if run.recipe is None:
        return None, "the recipe is not known"
    try:
        return parts(run.recipe), ""
    except UserError as error:
        return None, str(error)


# ---- the partition


def partition(run: Run, name: str, made: list[Part] | None, why: str) -> Section:
    section = Section("Partition", "Where the network is cut, and what each stage has of it. The slowest stage sets "
                                   "the pace of all.")  # fmt: skip
    if made is None:
        return section.html(missing(f"not known: {why}"))
    rows: list[tuple[str, Sequence[float]]] = [
        ("parameters", [part.parameters for part in made]), ("FLOPs", [part.flops for part in made]),
    ]  # fmt: skip
    times = _times(run.trace) if run.trace and len(made) == run.trace.K else None
    if times:
        rows.append(("time", times))
    shown = [row for row in rows if sum(row[1]) > 0]
    caption = "" if times else f"Time is not among them: train with `{TRACE}`."
    section.pictures(Picture(f"{name}-partition", "Share of each stage", lambda width: shares(shown, width), caption))

    def percent(values: Sequence[float], k: int) -> str:
        return f"{100 * values[k] / sum(values):.1f} %" if sum(values) else "-"

    columns = ["stage", "units", "from", "to", "parameters", "share", "FLOPs a sample", "share of FLOPs"]
    cells = [[f"{k + 1}", f"{part.units}", part.first, part.last, f"{part.parameters:,}", percent(rows[0][1], k),
              f"{part.flops:,}", percent(rows[1][1], k), *([percent(times, k)] if times else [])]
             for k, part in enumerate(made)]  # fmt: skip
    return section.html(table([*columns, *(["share of time"] if times else [])], cells, names=("from", "to")))


def _times(trace: Trace) -> list[float] | None:
    """Seconds a batch of each stage, as recorded."""
    found = [trace.seconds(k, "forward") + trace.seconds(k, "backward") for k in range(1, trace.K + 1)]
    return found if all(found) else None


# ---- stage by stage


def stage_by_stage(run: Run, name: str) -> Section:
    """Staleness, memory and idle time, where they are known."""
    made = {"staleness": _staleness(run, name), "memory": _memory(run, name), "idle time": _idle(run, name)}
    section = Section("Stage by stage").pictures(*(picture for picture in made.values() if picture))
    unknown = [what for what in ("staleness", "memory") if made[what] is None]
    if unknown:
        section.html(missing(f"no {' or '.join(unknown)} recorded yet: the first epoch is not behind this run"))
    if made["idle time"] is None:
        section.html(missing(f"no idle time: train with `{TRACE}`"))
    return section


def _staleness(run: Run, name: str) -> Picture | None:
    if run.staleness is None:
        return None
    formula = run.formula
    drawn = [
        Bar(f"stage {k}", value, f"{value:.2f}", mark=formula[k - 1] if formula else None,
            tip=f"stage {k}: {value:.4f} measured" + (f", {formula[k - 1]:.4f} by the formula" if formula else ""))
        for k, value in enumerate(run.staleness, start=1)
    ]  # fmt: skip
    off = max(abs(value - wanted) for value, wanted in zip(run.staleness, formula or run.staleness, strict=True))
    told = "Updates between the forward and the backward of a batch, as counted while training"
    told += f"; within {max(off, 0.001):.3f} of the formula." if formula else "."
    mark = "the formula" if formula else ""
    return Picture(f"{name}-staleness", "Mean staleness", lambda width: bars(drawn, width, mark=mark), told, 3)


def _memory(run: Run, name: str) -> Picture | None:
    if run.memory is None:
        return None
    drawn = [Bar(f"stage {k}", value, size(value), tip=f"stage {k}: {value:,.0f} bytes")
             for k, value in enumerate(run.memory, start=1)]  # fmt: skip
    told = "Weights and their versions, gradients, optimizer state, batches in flight; not an operation's temporaries."
    total = f"{size(sum(run.memory))} in all"
    return Picture(f"{name}-memory", "Peak memory", lambda width: bars(drawn, width, note=total), told, 3)


def _idle(run: Run, name: str) -> Picture | None:
    if run.trace is None:
        return None
    trace, plan = run.trace, None
    if run.recipe is not None and run.recipe.K == trace.K:
        method = run.recipe.make_method()
        costs = trace.costs(method)
        plan = planned_idle(planned(method, costs, turns=8 * trace.K)) if usable(costs) else None
    drawn = [
        Bar(f"stage {k}", share, f"{100 * share:.1f} %", mark=plan[k - 1] if plan else None,
            tip=f"stage {k}: idle {100 * share:.1f} %" + (f", {100 * plan[k - 1]:.1f} % by the plan" if plan else ""))
        for k, share in enumerate(trace.idle(), start=1) if share is not None
    ]  # fmt: skip
    told = "Share of the recorded time in which a stage did nothing of its own."
    return Picture(f"{name}-idle", "Idle time", lambda width: bars(drawn, width, mark="by the plan" if plan else "",
                   limit=1.0), told, 3)  # fmt: skip


# ---- time


def timelines(run: Run, name: str, made: list[Part] | None) -> Section:
    section = Section("Timeline", "What every stage does when; stage 1, the input, is at the bottom, so forwards climb "
                                  "and backwards descend.")  # fmt: skip
    recipe = run.recipe
    if run.trace is None:
        section.html(missing(f"no trace: train with `{TRACE}` to see what really happened beside the plan"))
        if recipe is not None:
            _plan_alone(section, recipe, name, made)
        return section
    trace = run.trace

    def recorded(width: int) -> Canvas:
        cut = trace.excerpt(turns_of(trace.K, width))
        return lanes(cut, width, length=cut.length)

    told = (
        "A typical stretch: of all with as many turns, the one of median length. A number is a batch, blank is idle; "
        "the whole trace.json opens in `ui.perfetto.dev`."
    )
    section.pictures(Picture(f"{name}-timeline", "As recorded", recorded, told))
    if recipe is None or trace.K != recipe.K:
        return section.html(missing("no plan beside it: the recipe does not say what the trace is of"))
    method = recipe.make_method()
    costs = trace.costs(method)
    if not usable(costs):
        return section.html(missing("no plan beside it: the trace has no forward or backward of some stage"))

    def plan(width: int) -> Canvas:
        turns = turns_of(trace.K, width)
        cut = trace.excerpt(turns)
        first = next((spell.batch for spell in sorted(cut.of(1, "forward"), key=lambda spell: spell.start)), None)
        return lanes(planned(method, costs, turns=turns, length=cut.length, first=first), width, length=cut.length)

    said = (
        "The same stretch of time by the clock: the recorded median of each operation, each as soon as its message is "
        "there, in steady state, messages without delay."
    )
    section.pictures(Picture(f"{name}-plan", "As planned", plan, said))
    if recipe.engine == "simulate" and recipe.K > 1:
        section.html(missing("This run simulated its stages: they took turns in one process and wait for each other as "
                             "no plan says. With `--engine processes` they run at the same time."))  # fmt: skip
    return section


def turns_of(K: int, width: int) -> int:
    """How many turns of a stage a picture of this width shows."""
    turns = min(16, max(6, 2 * K))
    return turns if width > 600 else max(3, turns // 3)


def _plan_alone(section: Section, recipe: Recipe, name: str, made: list[Part] | None) -> None:
    known = made is not None and all(part.flops > 0 for part in made)
    costs = alike([part.flops for part in made] if made and known else [1.0] * recipe.K)
    method = recipe.make_method()

    def plan(width: int) -> Canvas:
        drawn = planned(method, costs, turns=turns_of(recipe.K, width))
        return lanes(drawn, width, length=drawn.length, scale=1.0, unit="F, the mean forward of a stage")

    by = "forwards by their FLOPs" if known else "equal stages"
    told = f"By the clock, in steady state: {by}, B = 2F, messages without delay."
    section.pictures(Picture(f"{name}-plan", "As planned", plan, told))


# ---- drift


def drift(run: Run, name: str) -> Section:
    section = Section("Drift", "What staleness does to a gradient: how far the weights move while a batch is under "
                               "way, and how well its gradient still points where a fresh one would.")  # fmt: skip
    if not run.diagnosis:
        return section.html(missing(f"no diagnosis: train with `{DIAGNOSE}`"))

    def gap(line: Diagnosis) -> float:
        return 100 * line.gap / line.norm if line.norm else 0.0

    return section.pictures(
        _drift(run, f"{name}-gap", "Parameter gap", "Distance of the weights now from those that forwarded the batch, "
               "in % of their norm.", "gap, %", gap, form=".3g", unit=" %"),
        _drift(run, f"{name}-gradient", "Gradient norm", "L2 norm of the stale gradient.", "norm",
               lambda line: line.gradient, form=".3g"),
        _drift(run, f"{name}-cosine", "Stale against fresh", "Cosine of the stale gradient and a fresh one of the same "
               "batch; 1 is the same direction.", "cosine", lambda line: line.cosine, form=".3f", log=False),
    )  # fmt: skip


def _drift(
    run: Run, name: str, title: str, caption: str, axis: str, value: Callable[[Diagnosis], float], *, form: str,
    unit: str = "", log: bool | None = None,
) -> Picture:  # fmt: skip
    """A line a stage over the updates, the first stage in full colour and the later ones fainter."""
    stages = sorted({line.stage for line in run.diagnosis})
    drawn = []
    for k in stages:
        points = [(float(line.update), value(line)) for line in run.diagnosis if line.stage == k]
        named = len(stages) <= 8 or k in (stages[0], stages[-1])
        drawn.append(Line(f"stage {k}" if named else "", sorted(points), faint=0.66 * (k - 1) / max(1, stages[-1] - 1)))
    positive = all(point[1] > 0 for line in drawn for point in line.points)
    log = log if positive else False
    return Picture(name, title, lambda width: lines(drawn, width, x="update", y=axis, whole=True, form=form, unit=unit,
                   height=250, log=log), caption, across=3)  # fmt: skip
