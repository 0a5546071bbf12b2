"""The folders of a report; incomplete and broken files are reported in it, not raised.

a run              config.json, metrics.jsonl, trace.json, diagnosis.jsonl
a comparison       config.json with its runs;  a reproduction: reproduction.json and runs/
a benchmark        bench.json;  a scaling study: scaling.json
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

from offbeat.errors import UserError, first_line
from offbeat.report.formatting import counted
from offbeat.report.traces import Trace, finite, read_trace
from offbeat.runs.recipe import Recipe, from_json, make_recipe
from offbeat.runs.record import Changes, changes_of, standing
from offbeat.runs.task import CLASSIFICATION, LANGUAGE, LearningTask

T = TypeVar("T")
# raised where a record lacks something, or has another kind of value
INCOMPLETE = (UserError, OSError, LookupError, TypeError, ValueError, AttributeError, ZeroDivisionError)


@dataclass(frozen=True)
class Epoch:
    """The records of a run for one epoch; the metric is that of its task."""

    number: int  # from 1
    seconds: float
    test: float
    training: float | None


@dataclass(frozen=True)
class DiagnosisLine:
    """How stale the gradient of one stage was at one update: see --diagnose."""

    stage: int
    update: int
    gap: float
    norm: float
    gradient: float
    cosine: float
    lag: float
    changes: Changes = field(default=None, kw_only=True)  # not in older files


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A run folder, as far as it can be read.

    task      what it learns, which determines the metric and the unit of its speed
    state     "finished", "failed", "stopped" or "under way"; reason: why it failed
    problems  what could not be read, one line each
    """

    path: Path
    recipe: Recipe | None
    task: LearningTask = CLASSIFICATION
    provenance: dict[str, Any]
    epochs: list[Epoch]
    state: str
    reason: str = ""
    metric: float | None = None
    top5: float | None = None
    speed: float | None = None
    seconds: float | None = None
    staleness: list[float] | None = None
    memory: list[float] | None = None
    trace: Trace | None = None
    diagnosis: list[DiagnosisLine] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def curve(self) -> list[float]:
        """The metric after each epoch."""
        return [epoch.test for epoch in self.epochs]

    @property
    def times(self) -> list[float]:
        """Seconds of training until the end of each epoch."""
        return list(accumulate(epoch.seconds for epoch in self.epochs))

    @property
    def formula(self) -> list[float] | None:
        """Staleness of every stage by its formula."""
        if self.recipe is None:
            return None
        method, K = self.recipe.make_method(), self.recipe.K
        return [method.staleness(k, K) for k in range(1, K + 1)]

    @property
    def best(self) -> Epoch | None:
        return min(self.epochs, key=lambda epoch: epoch.test, default=None)


def kind_of(path: Path) -> str:
    """Which of the kinds a folder is; UserError where it is none."""
    try:
        if not path.is_dir():
            raise UserError(
                f"{path} is not a folder: give the folder of a run, a comparison, a reproduction or a benchmark"
            )
        for name, kind in (("reproduction.json", "reproduction"), ("bench.json", "bench"), ("scaling.json", "scaling")):
            if (path / name).exists():
                return kind
        if (path / "config.json").exists():
            content = read_json(path / "config.json", [])
            return "comparison" if isinstance(content, dict) and "comparison" in content else "run"
        if (path / "metrics.jsonl").exists():
            return "run"
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or first_line(error)}): give another folder") from None
    raise UserError(
        f"{path} holds none of config.json, metrics.jsonl, reproduction.json, bench.json, scaling.json: "
        "give the folder of a run, a comparison, a reproduction or a benchmark, or a folder of such"
    )


def folders_of_runs(folder: Path) -> list[Path]:
    """The folder itself, or those in it that a report can show where it holds no records; UserError where there are
    none."""
    try:
        kind_of(folder)
    except UserError:
        inside = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
        found = [path for path in inside if _is_shown(path)]
        if not found:
            raise
        return found
    return [folder]


def _is_shown(path: Path) -> bool:
    try:
        kind_of(path)
    except UserError:
        return False
    return True


def read_json(path: Path, problems: list[str], *, again: str = "") -> Any:
    """The content of a JSON file; None, and a line more in `problems`, where it is broken."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path.name} cannot be read ({first_line(error)}){again}")
        return None


def read_lines(path: Path, problems: list[str]) -> Iterator[dict[str, Any]]:
    """The lines of a .jsonl file that are JSON objects; the last one may be half-written, others are counted."""
    try:
        texts = path.read_text(errors="replace").split("\n")
    except OSError as error:
        problems.append(f"{path.name} cannot be read ({error.strerror or first_line(error)})")
        return
    broken = 0
    for text in texts[:-1]:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            yield value
        else:
            broken += 1
    if broken:
        problems.append(f"{path.name}: {counted(broken, 'line')} could not be read, left out")


def read_run(path: Path) -> RunRecord:
    """What a run folder holds."""
    problems: list[str] = []
    recipe, provenance = _config(path, problems)
    every = (
        [line for line in read_lines(path / "metrics.jsonl", problems) if isinstance(line.get("kind"), str)]
        if (path / "metrics.jsonl").exists()
        else []
    )
    try:
        lines = standing(every)
    except (KeyError, TypeError):
        problems.append(
            "metrics.jsonl: the batch of a resumed checkpoint cannot be read, so epochs may be listed twice"
        )
        lines = every
    task = recipe.task if recipe else _task(lines)
    epochs = _each(lines, "epoch", partial(_epoch, task), "metrics.jsonl", problems)
    ends = [line for line in lines if line["kind"] in ("result", "failed", "interrupted", "resumed")]
    last = ends[-1] if ends else {"kind": "nothing"}
    state = {"result": "finished", "failed": "failed", "interrupted": "stopped"}.get(last["kind"], "under way")
    if state == "finished" and _number(last.get("loss")) is None:
        state, last = "failed", {**last, "reason": f"the test loss is {last.get('loss')} at the end"}
    result = last if last["kind"] == "result" else {}
    stages = [line for line in lines if line["kind"] in ("epoch", "result") and line.get("memory")]
    K = recipe.K if recipe else None
    speeds = [task.speed(line) for line in lines if line["kind"] == "epoch"]
    return RunRecord(
        path=path,
        recipe=recipe,
        task=task,
        provenance=provenance,
        epochs=epochs,
        state=state,
        reason=str(last.get("reason", "")) if state == "failed" else "",
        metric=_number(result.get(task.key)),
        top5=_number(result.get("top5")),
        speed=_number(task.speed(result) or (speeds[-1] if speeds else None)),
        seconds=_number(result.get("seconds")) or sum(epoch.seconds for epoch in epochs) or None,
        staleness=_of_stages([line.get("staleness") for line in lines if line["kind"] in ("epoch", "result")], K),
        memory=_of_stages([line["memory"] for line in stages], K),
        trace=_trace(path, problems),
        diagnosis=_diagnosis(path, problems),
        problems=problems,
    )


def _config(path: Path, problems: list[str]) -> tuple[Recipe | None, dict[str, Any]]:
    if not (path / "config.json").exists():
        problems.append("there is no config.json, so what was run is not known")
        return None, {}
    content = read_json(path / "config.json", problems)
    if content is None:
        return None, {}
    content = mapping(content)
    try:
        recipe = make_recipe(**from_json(content["recipe"], path / "config.json"))
    except (UserError, KeyError, TypeError, AttributeError, ValueError) as error:
        problems.append(f"config.json holds no recipe that can be read ({first_line(error)})")
        recipe = None
    return recipe, mapping(content.get("provenance"))


def _each(
    lines: list[dict[str, Any]], kind: str, make: Callable[[dict[str, Any]], T], name: str, problems: list[str]
) -> list[T]:
    """The lines of a kind, parsed; those that cannot be are counted."""
    made, odd = [], 0
    for line in lines:
        if line.get("kind", kind) == kind:
            try:
                made.append(make(line))
            except (KeyError, TypeError, ValueError):
                odd += 1
    if odd:
        problems.append(f"{name}: {counted(odd, 'line')} without the expected figures, left out")
    return made


def _task(lines: list[dict[str, Any]]) -> LearningTask:
    """The task of a run without a recipe, by its records."""
    return LANGUAGE if any(f"test_{LANGUAGE.key}" in line for line in lines) else CLASSIFICATION


def _epoch(task: LearningTask, line: dict[str, Any]) -> Epoch:
    metric, seconds = float(line[f"test_{task.key}"]), float(line["seconds"])
    if not (math.isfinite(metric) and math.isfinite(seconds)):
        raise ValueError
    return Epoch(int(line["epoch"]) + 1, seconds, metric, _number(line.get(f"train_{task.key}")))


def _diagnosis(path: Path, problems: list[str]) -> list[DiagnosisLine]:
    if not (path / "diagnosis.jsonl").exists():
        return []

    def make(line: dict[str, Any]) -> DiagnosisLine:
        values = [float(line[name]) for name in ("gap", "norm", "gradient", "cosine", "lag")]
        if not all(map(math.isfinite, values)) or int(line["stage"]) < 1:
            raise ValueError
        changes = changes_of(line)
        if not all(map(math.isfinite, changes or ())):
            raise ValueError
        return DiagnosisLine(int(line["stage"]), int(line["update"]), *values, changes=changes)

    return _each(list(read_lines(path / "diagnosis.jsonl", problems)), "", make, "diagnosis.jsonl", problems)


def _trace(path: Path, problems: list[str]) -> Trace | None:
    file = path / "trace.json"
    content = read_json(file, problems, again=": train with --trace 200 again") if file.exists() else None
    if content is None:
        return None
    try:
        return read_trace(content)
    except UserError as error:
        problems.append(f"trace.json cannot be read ({error}): train with --trace 200 again")
        return None


def mapping(value: Any) -> dict[str, Any]:
    """A JSON object; of any other value an empty one."""
    return value if isinstance(value, dict) else {}


def mappings(value: Any) -> list[dict[str, Any]]:
    """The JSON objects in a list; of any other value none."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def numbers(value: Any) -> list[float]:
    """The finite numbers in a list, or a number alone.

    >>> numbers([1, None, float("nan"), "2", 3.5]), numbers(7)
    ([1.0, 3.5], [7.0])
    """
    found = map(_number, value if isinstance(value, list) else [value])
    return [number for number in found if number is not None]


def _number(value: Any) -> float | None:
    """A finite number, or None."""
    return float(value) if finite(value) else None


def _of_stages(values: list[Any], K: int | None) -> list[float] | None:
    """The last of these that has one number per stage."""
    for value in reversed(values):
        if isinstance(value, list) and value and (K is None or len(value) == K):
            numbers = [_number(item) for item in value]
            if all(item is not None for item in numbers):
                return [item for item in numbers if item is not None]
    return None
