"""Train a recipe into a run folder: in this process, in worker processes started here, or in those of torchrun."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

from offbeat.errors import FolderTaken, Interrupted, NotFinite, UserError
from offbeat.methods import AUTO
from offbeat.runs import launch
from offbeat.runs.group import from_first
from offbeat.runs.recipe import (
    Recipe,
    changed,
    check_types,
    from_json,
    given_values,
    load,
    make_recipe,
    without_default_rate,
)

MOST_ROLLBACKS = 5  # of one run


class Result(TypedDict):
    """What a run returns, and writes as the last line of metrics.jsonl.

    loss, error, top5    mean loss, and error and top-5 error in percent, on the test data
    bits_per_byte        of text, instead of errors: the loss in bits, divided by the bytes per token
    samples_per_second   median over the epochs, without the first if there are more
    tokens_per_second    of text: the same in tokens
    seconds              of training and evaluation, before resuming included
    staleness            measured: mean over the updates, in updates, per stage
    staleness_formula    the same as theory has it
    memory               most bytes that each stage held
    out                  the run folder
    """

    loss: float
    error: float | None
    top5: float | None
    bits_per_byte: NotRequired[float]
    samples_per_second: float
    tokens_per_second: NotRequired[float]
    seconds: float
    staleness: list[float]
    staleness_formula: list[float]
    memory: list[int]
    out: str


class Ready(TypedDict):
    """A run that was checked and could begin; returned by `check_run`."""

    recipe: dict[str, Any]
    batches_an_epoch: int
    out: str


def train(
    recipe: Recipe | None = None,
    *,
    out: Path | str | None = None,
    resume: Path | str | None = None,
    show: bool = False,
    max_restarts: int = 0,
    silence: float | None = None,
    timeout: float | None = None,
    **changes: Any,
) -> Result | None:
    """Train a recipe into a run folder and return the result; or resume a run.

    Args:
        recipe: what to train, as `make_recipe` makes it. Its engine decides where: in this process, or in worker
            processes that are started here, one per stage and replica. Under torchrun, every process calls `train`
            with the same arguments.
        out: the run folder, which must not contain a run. Default: a new one in ``runs/``.
        resume: the folder of a run that was stopped. It continues from its newest checkpoint.
        show: print the progress to stderr.
        max_restarts: how often the worker processes are restarted from the newest checkpoint after a failure.
        timeout: seconds that a process waits for others before all of them stop. Default: without limit, since all
            make the same calls; lost processes are found by `silence`.
        silence: seconds without a message after which another process counts as lost. Default: that of the
            environment variable ``OFFBEAT_SILENCE``, or 30.
        changes: with `resume`, settings of the recipe to change, by name: ``epochs=4``.

    Returns:
        The result (see `Result`); None in processes of torchrun that do not have the first stage.

    Raises:
        UserError: in one line, why the run cannot be trained or has failed. `NotFinite` and `StageLost` are such.
        Interrupted: Ctrl-C or SIGTERM stopped the run, after a checkpoint.

    >>> import tempfile
    >>> recipe = make_recipe(model="resnet8", data="synthetic", shape=(3, 8, 8), samples=32, K=2, M=2, epochs=1,
    ...                   engine="simulate", checkpoint_every="1e")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     first = train(recipe, out=f"{folder}/run")
    ...     longer = train(resume=f"{folder}/run", epochs=2)
    >>> longer["staleness"], longer["out"] == first["out"]
    ([0.0, 0.0], True)
    """
    _check_options(max_restarts, silence, timeout)
    recipe, folder = resolved(recipe, out=out, resume=resume, changes=changes)
    if launch.joined_group():
        return _train_as_member(recipe, folder, show=show, resumed=resume is not None, silence=silence, timeout=timeout)
    recipe, _ = _checked(recipe, folder, resumed=resume is not None)
    return _train_with_rollbacks(
        recipe,
        folder,
        show=show,
        resumed=resume is not None,
        max_restarts=max_restarts,
        silence=silence,
        timeout=timeout,
    )


def check_run(
    recipe: Recipe | None = None,
    *,
    out: Path | str | None = None,
    resume: Path | str | None = None,
    max_restarts: int = 0,
    silence: float | None = None,
    timeout: float | None = None,
    **changes: Any,
) -> Ready:
    """Check everything that `train` checks before it trains; train and write nothing."""
    _check_options(max_restarts, silence, timeout)
    if launch.joined_group():
        raise UserError("a check alone (dry run) under torchrun: run it once, without torchrun")
    recipe, folder = resolved(recipe, out=out, resume=resume, changes=changes)
    recipe, samples = _checked(recipe, folder, resumed=resume is not None)
    return {"recipe": recipe.as_dict(), "batches_an_epoch": recipe.count(samples).per_epoch, "out": str(folder)}


def _check_options(max_restarts: int, silence: float | None, timeout: float | None) -> None:
    from offbeat.engines.processes import seconds_of, silence_allowed

    if not isinstance(max_restarts, int) or max_restarts < 0:
        raise UserError(f"max_restarts={max_restarts!r}: use an integer of at least 0")
    if silence is not None:
        silence_allowed(silence)
    if timeout is not None:
        seconds_of(timeout, "timeout")


def resolved(
    recipe: Recipe | None, *, out: Path | str | None, resume: Path | str | None, changes: Mapping[str, Any]
) -> tuple[Recipe, Path]:
    """The recipe and the folder of a run, new or resumed; the same in every process of torchrun."""
    for name, path in (("out", out), ("resume", resume)):
        if not isinstance(path, str | os.PathLike | None) or "\0" in str(path) or path == "":
            raise UserError(f"{name}={path!r}: give the name of a folder")
    if resume is None:
        if recipe is None or changes:
            given = ", ".join(f"{name}={value!r}" for name, value in changes.items())
            what = f"{given} without resume=" if changes else "no recipe"
            raise UserError(f"{what}: give train a recipe, as offbeat.make_recipe(K=2, M=4) makes one")
        if not isinstance(recipe, Recipe):
            kind = type(recipe).__name__
            raise UserError(f"recipe is of type {kind}: give one that offbeat.make_recipe(K=2, M=4) makes")
        return recipe, Path(out) if out is not None else free_folder(recipe)
    if recipe is not None or out is not None:
        raise UserError(f"resume={str(resume)!r} names the run folder: leave out recipe= and out=")
    folder = Path(resume)
    agreed = from_first(lambda: resumed_recipe(folder, changes).as_dict())
    return make_recipe(**from_json(agreed, folder / "config.json")), folder


def _train_as_member(
    recipe: Recipe, out: Path, *, show: bool, resumed: bool, silence: float | None, timeout: float | None
) -> Result | None:
    """Train as one of the processes that torchrun, or the launcher of this package, has started."""
    from offbeat.runs.begin import train_here

    recipe = replace(recipe, engine="processes")
    if launch.is_worker():  # its launcher has made the folder, and reports what ends it early
        return cast(Result, train_here(recipe, out, show=show, folder_ready=True, silence=silence, timeout=timeout))
    if recipe.on_nan == "rollback":
        raise UserError(
            "on_nan='rollback' under torchrun, which cannot begin again from here: use on_nan='stop' or 'skip', or "
            "start the run without torchrun"
        )
    with kept(out):
        found = train_here(
            recipe, out, show=show, folder_ready=resumed, rewrite=resumed, silence=silence, timeout=timeout
        )
    return cast(Result, found)


def _checked(recipe: Recipe, out: Path, *, resumed: bool) -> tuple[Recipe, int]:
    """The recipe with its cuts, and the samples of an epoch; raises UserError where the run cannot begin."""
    from offbeat import checkpoint
    from offbeat.runs import record, resuming
    from offbeat.runs.build import check

    if not resumed:
        record.check_free(out)
    try:
        recipe, known = check(recipe)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
            raise
        raise UserError("there is not enough memory here: use smaller shape=, classes= or batch_size=") from error
    launch.check_workers([recipe])
    if resumed and (found := checkpoint.newest(out)[0]):
        resuming.continued(recipe, known.samples, found.run())
    return recipe, known.samples


def _train_with_rollbacks(
    recipe: Recipe,
    out: Path,
    *,
    show: bool,
    resumed: bool,
    max_restarts: int,
    silence: float | None,
    timeout: float | None,
) -> Result | None:
    """Train in this process or in workers; with on_nan="rollback", again without the batches that were not finite."""
    from offbeat.runs import lock, record
    from offbeat.runs.begin import train_here

    for rollback in range(MOST_ROLLBACKS + 1):
        try:
            with lock.held(out), kept(out):
                record.RunFolder.create(out, recipe, again=resumed or rollback > 0)
                if recipe.engine != "processes":
                    return cast(
                        Result, train_here(recipe, out, show=show, folder_ready=True, silence=silence, timeout=timeout)
                    )
                arguments = ["train", "--config", str(out / "config.json"), "--out", str(out)]
                arguments += [] if show else ["--json"]
                arguments += [] if silence is None else ["--silence", str(silence)]
                arguments += [] if timeout is None else ["--timeout", str(timeout)]
                launch.launch(recipe.K, arguments, replicas=recipe.replicas, max_restarts=max_restarts)
                results = [line for line in record.lines(out) if line["kind"] == "result"]
                return cast(Result, {**results[-1], "out": str(out)}) if results else None
        except NotFinite as error:
            if recipe.on_nan != "rollback" or rollback == MOST_ROLLBACKS:
                raise
            recipe = replace(recipe, left_out=tuple(sorted({*(recipe.left_out or ()), *error.batches})))
            print(f"offbeat: {error}; resuming from the last checkpoint without these batches", file=sys.stderr)
    raise AssertionError("unreachable")


def resumed_recipe(run: Path, chosen: Mapping[str, Any]) -> Recipe:
    """The recipe with which a run continues, with these changes; cuts and threads follow a new K."""
    from offbeat.runs import lock, record, resuming

    if not (run / "config.json").exists():
        raise UserError(f"resume={str(run)!r} holds no config.json: give the folder of a run that was stopped")
    try:
        before = load(run / "config.json")
    except UserError as error:
        raise UserError(f"resume={str(run)!r} is not the folder of a run that can be resumed: {error}") from error
    check_types(given_values(chosen))
    if chosen.get("method") == AUTO:  # it was chosen when the run began
        chosen = {name: value for name, value in chosen.items() if name != "method"}
        chosen["settings"] = {name: value for name, value in chosen.get("settings", {}).items() if name != "latency"}
    before.pop("trace", None)  # it has been recorded
    finished = any(line["kind"] == "result" for line in record.lines(run))
    if finished and (chosen.get("epochs") or 0) <= before["epochs"]:
        raise UserError(f"{run} is finished (epochs={before['epochs']}): to continue, increase epochs=")
    with lock.held(run):  # find removes unfinished checkpoints
        found, _ = resuming.find(run)
    if found is None:
        raise UserError(
            f"{run} has no valid checkpoint to resume from: start a new run, with checkpoint_every=, and without keep=0"
        )
    if chosen.get("K", before["K"]) != before["K"] or "units" in chosen:
        for name in ("cuts", "units", "threads_per_stage", "speeds", "engine"):
            before.pop(name, None)
    if chosen.get("replicas", before.get("replicas", 1)) != before.get("replicas", 1):
        for name in ("threads_per_stage", "engine"):
            before.pop(name, None)
    return make_recipe(**changed(without_default_rate(before), chosen))


@contextmanager
def kept(out: Path) -> Iterator[None]:
    """Record why a run ends early, and name its folder in the error. A run that could not be resumed keeps its recipe.

    Under torchrun the first stage makes the folder once all processes have joined; until then there are no records.
    """
    from offbeat.runs.record import RunFolder, RunState

    leads, before = os.environ.get("RANK", "0") == "0", RunState.of(out)

    def last_line(kind: str, **values: str) -> None:
        if leads and (out / "config.json").exists():
            RunFolder(out).line(kind, **values)

    try:
        yield
    except (KeyboardInterrupt, Interrupted) as error:
        last_line("interrupted")
        where = f"; the records so far are in {out}" if out.exists() else ""
        raise Interrupted(f"{str(error) or 'stopped by Ctrl-C'}{where}") from None
    except NotFinite as error:
        last_line("failed", reason=str(error))
        raise NotFinite(f"{error} ({last_good(out)}; records so far: {out})", error.batches) from None
    except FolderTaken:  # the records are those of another run
        raise
    except UserError as error:
        last_line("failed", reason=str(error))
        if leads:
            before.put_back(out)
        where = f" (records so far: {out})" if out.exists() else ""
        raise type(error)(f"{error}{where}") from None


def last_good(out: Path) -> str:
    """The checkpoint that a run can be resumed from, for errors."""
    from offbeat.checkpoint import ls

    found = [listed.path for listed in ls(out) if listed.checkpoint]
    return f"last good checkpoint: {found[-1]}" if found else "no checkpoint"


def file_name(model: str) -> str:
    """The name of a model as part of a file name.

    >>> file_name("gpt:layers=2,width=32"), file_name("hf:/models/gpt2/config.json")
    ('gpt-layers=2-width=32', 'hf-models-gpt2-config.json')
    """
    return re.sub(r"[^\w.=]+", "-", model)


def free_folder(recipe: Recipe) -> Path:
    """The default run folder, with a number appended if it exists."""
    copies = f"-R{recipe.replicas}" if recipe.replicas > 1 else ""
    stages = f"K{recipe.K}{copies}-M{recipe.M}"
    name = f"{recipe.data}-{file_name(recipe.model)}-{recipe.method}-{stages}-seed{recipe.seed}"
    folder, count = Path("runs") / name, 1
    while (folder / "config.json").exists() and not launch.is_worker():
        count += 1
        folder = Path("runs") / f"{name}-{count}"
    return folder
