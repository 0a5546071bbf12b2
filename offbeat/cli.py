"""The command line: reads options, prints results, turns what went wrong into one line and an exit code."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from offbeat import launch, options
from offbeat.errors import FolderTaken, Interrupted, NotCompiled, NotFinite, NotFused, NotRecorded, UserError
from offbeat.group import from_first
from offbeat.options import numbers, spread
from offbeat.recipe import Recipe, changed, complete, linear_rate, load, settings

INTERRUPTED = 130
MOST_ROLLBACKS = 5  # of one run

app = typer.Typer(
    name="offbeat",
    help="Train deep networks whose modules never wait for each other.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> NoReturn:
    """The console command. Exit codes: 0 done, 1 nothing to compare, 2 told in one line, 130 stopped by Ctrl-C."""
    if launch.is_worker() or os.environ.get(launch.LAUNCHER) == str(os.getppid()):  # the latter: of a comparison
        launch.die_with_parent()
    warnings.showwarning = told_or(warnings.showwarning)
    try:
        code = app(standalone_mode=False)
        if code == INTERRUPTED:  # typer's own answer to Ctrl-C
            raise Interrupted("stopped by Ctrl-C")
        leave(code if isinstance(code, int) else 0)
    except UserError as error:
        fail(error, str(error), 2)
    except (Interrupted, KeyboardInterrupt, typer.Abort) as error:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # one is enough
        fail(Interrupted(str(error)), str(error) or "stopped by Ctrl-C", INTERRUPTED)
    except Exception as error:
        if not hasattr(error, "format_message"):
            if launch.is_worker():
                launch.last_words(error)
            raise
        context = getattr(error, "ctx", None)
        where = context.command_path if context else "offbeat"
        said = error.format_message().rstrip(".") or "no command was given"
        fail(error, f"{said}; see '{where} --help'", 2)


def told_or(show: Callable[..., None]) -> Callable[..., None]:
    """Warnings of ours in one line, and a reason once, of however many stages it is; all others as they are shown."""
    told: set[tuple[type[Warning], str]] = set()

    def tell(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, NotCompiled | NotFused | NotRecorded):
            line = " ".join(str(message).split())
            reason = category, line.partition(": ")[2] or line
            if reason not in told:
                first = " (told of the first such stage)" * line.startswith("stage ")
                print(f"offbeat: {line}{first}", file=sys.stderr)
            told.add(reason)
        else:
            show(message, category, *place, **more)

    return tell


def fail(error: BaseException, line: str, code: int) -> NoReturn:
    """Say it in one line; a worker that was started here leaves it to its launcher."""
    if launch.is_worker():
        launch.last_words(error)
    else:
        print("offbeat: " + " ".join(line.split()), file=sys.stderr)
    leave(code)


def leave(code: int) -> NoReturn:
    """Exit; a member of a group does so at once, whatever its communication threads still wait for."""
    if launch.joined_group():
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


@app.command()
@spread
def train(
    data: options.Data,
    method: options.OneMethod,
    stages: options.Stages,
    schedule: options.Schedule,
    saved: options.Saving,
    looking: options.Looking,
    seed: Annotated[int | None, typer.Option(help="(default 0)")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with this run folder from its newest checkpoint; options change it.")
    ] = None,
    silence: Annotated[
        float | None, typer.Option(help="Seconds of silence after which a stage counts as lost. (default 30)")
    ] = None,
    max_restarts: Annotated[int, typer.Option(help="Start the K processes again so often after a failure.")] = 0,
    config: Annotated[Path | None, typer.Option(help="config.json of a run to repeat; options change it.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder. (default runs/DATA-MODEL-METHOD-K-M-SEED)")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, train nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="No progress; print the result as JSON.")] = False,
) -> None:
    """Train a network; the defaults are the paper's recipe."""
    chosen = options.chosen(data, method, stages, schedule, saved, looking)
    if seed is not None:
        chosen["seed"] = seed
    if silence is not None:
        if not silence > 0:
            raise UserError(f"--silence {silence:g}: use a number of seconds above 0, or inf")
        os.environ["OFFBEAT_SILENCE"] = str(silence)
    if max_restarts < 0:
        raise UserError(f"--max-restarts {max_restarts}: use a whole number from 0 up")
    if resume is not None:
        if config is not None or out is not None:
            raise UserError("--resume names the run folder: leave out --config and --out")
        agreed = from_first(lambda: going_on(resume, chosen).as_dict())
        recipe, out = complete(**settings(agreed, resume / "config.json")), resume
    else:
        recipe = complete(**changed(load(config) if config else {}, chosen))
    result = execute(recipe, out or free_folder(recipe), dry_run=dry_run, show=not as_json,
                     resumed=resume is not None, max_restarts=max_restarts)  # fmt: skip
    if result is None or launch.is_worker():
        return  # another process says it
    if as_json:
        print(json.dumps(result))
    else:
        report_result(result, dry_run=dry_run)


def going_on(run: Path, chosen: dict[str, Any]) -> Recipe:
    """The recipe of a run that goes on, with what is to change; cuts and threads follow a new K."""
    from offbeat import lock, record, saving

    before = load(run / "config.json")
    before.pop("trace", None)  # it has one
    finished = any(line["kind"] == "result" for line in record.lines(run))
    if finished and chosen.get("epochs", 0) <= before["epochs"]:
        raise UserError(f"{run} is finished, after {before['epochs']} epochs: give more --epochs to go on")
    with lock.held(run):  # it clears away what is unfinished
        found, _ = saving.find(run)
    if found is None:
        raise UserError(f"{run} has no sound checkpoint to go on from: start it anew, with --checkpoint-every")
    if chosen.get("K", before["K"]) != before["K"] or "units" in chosen:
        for name in ("cuts", "units", "threads_per_stage", "speeds", "engine"):
            before.pop(name, None)
    if before["lr"] == linear_rate(before["batch_size"], before["settings"]["M"]):  # which follows what changes
        before.pop("lr")
    return complete(**changed(before, chosen))


def execute(
    recipe: Recipe, out: Path, *, dry_run: bool = False, show: bool = True, resumed: bool = False, max_restarts: int = 0
) -> dict[str, Any] | None:
    """Check and run a recipe here, in workers started here, or as a member of the group that torchrun started."""
    from offbeat import checkpoint, lock, record, saving
    from offbeat.train import check
    from offbeat.train import train as run

    if launch.joined_group():
        if dry_run:
            raise UserError("--dry-run under torchrun: run it once, without torchrun")
        ready = resumed or launch.is_worker()
        with nullcontext() if launch.is_worker() else kept(out):  # what ends a worker early, its launcher tells
            return run(replace(recipe, engine="processes"), out, show=show, folder_ready=ready)
    if not resumed:
        record.check_free(out)
    try:
        recipe, known = check(recipe)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
            raise
        raise UserError("there is not enough memory here: use smaller --shape, --classes or --batch-size") from error
    if resumed and (found := checkpoint.newest(out)[0]):
        saving.continued(recipe, known.samples, found.run())
    if dry_run:
        epochs = recipe.count(known.samples)
        return {"recipe": recipe.as_dict(), "batches_an_epoch": epochs.per_epoch, "out": str(out)}
    for rollback in range(MOST_ROLLBACKS + 1):
        try:
            with lock.held(out), kept(out):
                record.RunFolder.create(out, recipe, again=resumed or rollback > 0)
                if recipe.engine != "processes":
                    return run(recipe, out, show=show, folder_ready=True)
                arguments = ["train", "--config", str(out / "config.json"), "--out", str(out)]
                launch.launch(recipe.K, arguments + ([] if show else ["--json"]), max_restarts=max_restarts)
                results = [line for line in record.lines(out) if line["kind"] == "result"]
                return {**results[-1], "out": str(out)} if results else None
        except NotFinite as error:
            if recipe.on_nan != "rollback" or rollback == MOST_ROLLBACKS:
                raise
            recipe = replace(recipe, left_out=tuple(sorted({*(recipe.left_out or ()), *error.batches})))
            print(f"offbeat: {error}; going back to the last checkpoint, without its batches", file=sys.stderr)
    raise AssertionError("unreachable")


@contextmanager
def kept(out: Path) -> Iterator[None]:
    """Whatever ends a run early is the last line of its records, and the message says where they are.

    Under torchrun the first stage makes the folder once all processes have joined: before, there are none.
    """
    from offbeat.record import RunFolder

    def last_line(kind: str, **values: str) -> None:
        if os.environ.get("RANK", "0") == "0" and (out / "config.json").exists():
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
    except FolderTaken:  # the records there are those of another run
        raise
    except UserError as error:
        last_line("failed", reason=str(error))
        where = f" (records so far: {out})" if out.exists() else ""
        raise type(error)(f"{error}{where}") from None


def last_good(out: Path) -> str:
    """Which checkpoint a run can go on from."""
    from offbeat.checkpoint import ls

    found = [listed.path for listed in ls(out) if listed.checkpoint]
    return f"last good checkpoint: {found[-1]}" if found else "no checkpoint"


def free_folder(recipe: Recipe) -> Path:
    """The default run folder, with a number behind it where there is one already."""
    name = f"{recipe.data}-{recipe.model}-{recipe.method}-K{recipe.K}-M{recipe.M}-seed{recipe.seed}"
    folder, count = Path("runs") / name, 1
    while (folder / "config.json").exists() and not launch.is_worker():
        count += 1
        folder = Path("runs") / f"{name}-{count}"
    return folder


def report_result(result: dict[str, Any], *, dry_run: bool) -> None:
    if dry_run:
        recipe = result["recipe"]
        M = recipe["settings"]["M"]
        how = f"{recipe['engine']}, {recipe['precision']}{', compiled' * recipe['compile']}{', fused' * recipe['fuse']}"
        print(
            f"ready: {recipe['model']} on {recipe['data']}, {recipe['method']} K={recipe['K']} M={M} "
            f"({how}), cuts {list(recipe['cuts'])}, {result['batches_an_epoch']} batches an epoch, "
            f"lr {recipe['lr']:g}; nothing was trained"
        )
        return
    print(
        f"test error {result['error']:.2f}%  {result['samples_per_second']:,.0f} samples/s  "
        f"staleness {' '.join(f'{level:.2f}' for level in result['staleness'])}  in {result['out']}"
    )


@app.command()
@spread
def compare(
    methods: Annotated[
        str, typer.Option(help="Such as bp,ddg,adl; with settings bp:M=2,gpipe:m=8,adl:M=4,corrector=sc.")
    ],
    data: options.Data,
    stages: options.Stages,
    schedule: options.Schedule,
    M: Annotated[int, typer.Option("-M", help="Gradients an update of the methods that are late and take one.")] = 4,
    match: Annotated[str, typer.Option(help="The same batch for all, or effective: as many samples an update.")] = (
        "batch"
    ),
    seeds: Annotated[int, typer.Option(help="Runs of each method.")] = 3,
    jobs: Annotated[int, typer.Option(help="Runs at a time, where one process simulates all stages.")] = 1,
    side_by_side: Annotated[int, typer.Option(help="Runs at a time by turns in this one process.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Folder of all runs. (default runs/compare-DATA-MODEL-K-M)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="No progress; print the table as JSON.")] = False,
) -> None:
    """Train by several methods under one recipe, and print one table; goes on where it was stopped."""
    from offbeat import compare as comparing

    comparison, folder = comparing.compare(
        methods=methods, match=match, seeds=seeds, M=M, chosen=options.chosen(data, stages, schedule), out=out,
        jobs=jobs, execute=execute, show=not as_json, together=side_by_side,
    )  # fmt: skip
    if as_json:
        print(json.dumps(comparison.as_dict()))
    else:
        comparing.show_comparison(comparison, folder)
    if not any(row.errors for row in comparison.rows):
        raise typer.Exit(1)


@app.command()
@spread
def reproduce(
    table: Annotated[str, typer.Argument(help="cifar10-table, ablation, curves or imagenet-table.")],
    running: options.Running,
    only: Annotated[
        str | None, typer.Option(help="Rows of these names, or that begin so: resnet56, or a,b; * stands for anything.")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="Rows of this method alone; with other settings, as in adl:M=2,corrector=sc.")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Drops of the rate stay in proportion. (default the paper's, 300 or 90)")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Runs of each row.")] = 3,
    budget_minutes: Annotated[
        float | None, typer.Option(help="Stop in time; the same command goes on, here or elsewhere. (default no end)")
    ] = None,
    side_by_side: Annotated[int, typer.Option(help="Runs at a time by turns in this one process.")] = 1,
    data: Annotated[Path | None, typer.Option(help="Folder or archive that holds the data.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of all runs; it can be moved. (default runs/TABLE)")] = None,
    list_rows: Annotated[bool, typer.Option("--list", help="Show the rows, run nothing.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, train nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="No progress; print the table as JSON.")] = False,
) -> None:
    """Run the paper's experiments again, row by row by worth, and print its values beside ours; can be stopped."""
    from offbeat import reproduce as reproducing

    request = reproducing.Request(
        table=table, only=only, method=method, epochs=epochs, seeds=seeds, minutes=budget_minutes,
        together=side_by_side, data=data, out=out, running=options.chosen(running),
    )  # fmt: skip
    if list_rows:
        reproducing.show_rows(request, as_json=as_json)
    elif dry_run:
        reproducing.show_ready(request, as_json=as_json)
    else:
        made, folder = reproducing.reproduce(request, show=not as_json)
        reproducing.show(made, folder, as_json=as_json)
        if made.count("failed"):
            raise typer.Exit(1)


benches = typer.Typer(help="Time everything that people use today beside Offbeat.", invoke_without_command=True,
                      add_completion=False)  # fmt: skip
app.add_typer(benches, name="bench")


@benches.callback()
def bench(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="Network; see 'offbeat models'.")] = "resnet110",
    batch_size: Annotated[int, typer.Option(help="Samples a batch, of all workers together.")] = 128,
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
        str, typer.Option(help="all, or some of bp-cores, bp-windows (GPU), torch-gpipe, torch-1f1b, torch-interleaved,"
                               " ddp, adl-1f1b, ddg, fr, dsp, gpipe; bp and adl are always there.")
    ] = "all",
    shape: Annotated[str | None, typer.Option(help="C,H,W of a sample. (default the network's)")] = None,
    device: Annotated[str, typer.Option(help="cpu, a core a worker; or cuda, one GPU.")] = "cpu",
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
    from offbeat.bench import rounds
    from offbeat.report import bench_table
    from offbeat.train import shape_of

    request = rounds.Request(
        model=model, batch_size=batch_size, K=K, M=M, methods=tuple(method or ()), against=against,
        shape=shape_of(numbers(shape, int, "--shape", ",x")),
        device=device, precision=precision, partition=partition, cuts=numbers(cuts, int, "--cuts"), units=units,
        profile=profile, micro_batches=numbers(micro_batches, int, "--micro-batches"), repetitions=repetitions,
        batches=batches, minutes=budget_minutes, out=out,
    )  # fmt: skip
    found, folder = rounds.bench(request, show=not as_json)
    if as_json:
        print(json.dumps(found))
    else:
        bench_table.show(found, str(folder))


@benches.command("scaling")
def bench_scaling(
    model: Annotated[str, typer.Option(help="Network whose stages K are changed.")] = "resnet110",
    batch_size: Annotated[int, typer.Option(help="Samples a batch.")] = 32,
    K: Annotated[int, typer.Option("-K", help="Stages where the batch or the depth changes.")] = 4,
    M: Annotated[int, typer.Option("-M", help="Gradients an update.")] = 4,
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
    from offbeat.bench import scaling

    request = scaling.Request(
        model=model, batch_size=batch_size, K=K, M=M, stages=numbers(stages, int, "--stages") or (),
        batch_sizes=numbers(batch_sizes, int, "--batch-sizes") or (), depths=tuple(filter(None, depths.split(","))),
        most_stages=most_stages, repetitions=repetitions, batches=batches, minutes=budget_minutes, out=out,
    )  # fmt: skip
    found, folder = scaling.scaling(request, show=not as_json)
    if as_json:
        print(json.dumps(found))
    else:
        scaling.show(found, str(folder))


@app.command()
def plan(
    model: Annotated[str, typer.Option(help="Network; see 'offbeat models'.")] = "resnet56",
    method: Annotated[
        str, typer.Option(help="A method, with settings as in adl:M=4,corrector=sc; or all.")
    ] = "adl",
    K: Annotated[int, typer.Option("-K", help="Stages.")] = 4,
    M: Annotated[int | None, typer.Option("-M", help="Gradients an update.")] = None,
    batch_size: Annotated[int, typer.Option(help="Samples a batch.")] = 32,
    shape: Annotated[str | None, typer.Option(help="C,H,W of a sample. (default the network's)")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda: where the units are measured.")] = "cpu",
    threads: Annotated[int, typer.Option(help="Threads of each worker.")] = 1,
    partition: Annotated[str, typer.Option(help="Balance measured time, or flops.")] = "measured",
    speeds: Annotated[str | None, typer.Option(help="Speeds of the K workers, such as 1,1,0.5.")] = None,
    memory_limit: Annotated[float | None, typer.Option(help="Megabytes a worker may use.")] = None,
    pin: Annotated[str | None, typer.Option(help="Cuts that must be among the chosen.")] = None,
    latency: Annotated[
        float | None, typer.Option(help="Milliseconds that any message is under way. (default 0.1)")
    ] = None,
    bandwidth: Annotated[float | None, typer.Option(help="Megabytes a second of a link. (default 2000)")] = None,
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

    from offbeat.cutting import By
    from offbeat.errors import unknown
    from offbeat.planning import show_plan
    from offbeat.train import shape_of

    if partition not in get_args(By):
        raise unknown("partition", partition, get_args(By))
    if not (0 <= (latency or 0.0) < float("inf") and (bandwidth is None or bandwidth > 0)):
        given = {name: value for name, value in (("latency", latency), ("bandwidth", bandwidth)) if value is not None}
        told = ", ".join(f"{name} {value}" for name, value in given.items())
        raise UserError(f"{told}: give milliseconds from 0 up, and megabytes a second above 0")
    sizes = shape_of(numbers(shape, int, "--shape", ",x"))
    show_plan(
        model=model, method=method, K=K, M=M, batch_size=batch_size, shape=sizes,
        device=device, threads=threads, by=partition, speeds=numbers(speeds, float, "--speeds"),
        memory_limit=None if memory_limit is None else memory_limit * 1e6, pinned=numbers(pin, int, "--pin") or (),
        latency=None if latency is None else latency / 1e3, bandwidth=None if bandwidth is None else bandwidth * 1e6,
        measure=measure_links, profile_file=profile, max_staleness=max_staleness, picture=picture,
        staleness_picture=staleness_picture, theory=theory, as_json=as_json,
    )  # fmt: skip


@app.command()
def models(as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False) -> None:
    """List the networks: parameters, forward FLOPs of one sample, largest K."""
    from dataclasses import asdict

    from rich.console import Console
    from rich.table import Table

    from offbeat import models as zoo

    described = [zoo.describe(name) for name in zoo.names()]
    if as_json:
        print(json.dumps([asdict(entry) for entry in described]))
        return
    table = Table("model", "input", "classes", box=None)
    for column in ("parameters", "FLOPs", "largest K"):
        table.add_column(column, justify="right")
    for entry in described:
        sizes = "x".join(map(str, entry.shape))
        counts = (f"{count:,}" for count in (entry.parameters, entry.flops, entry.units))
        table.add_row(entry.name, sizes, str(entry.classes), *counts)
    Console().print(table)


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="One of them, in full.")] = None,
    K: Annotated[int | None, typer.Option("-K", help="Stages of the timeline. (default 3)")] = None,
    M: Annotated[int | None, typer.Option("-M", help="Gradients an update in the timeline.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """List the training methods: locks, lag, weights, staleness, ideal speed-up; or one with settings and timeline."""
    from offbeat.describe import print_methods, show_methods
    from offbeat.methods import add_packages

    told = show_methods(name, K=K, M=M)
    for entry, reason in add_packages().items() if name is None else ():
        print(f"offbeat: method {entry} {reason}: update or uninstall the package", file=sys.stderr)
    if as_json:
        print(json.dumps(told))
    else:
        print_methods(told)


@app.command()
def demo(
    out: Annotated[Path | None, typer.Option(help="Folder of the runs. (default runs/demo)")] = None,
    epochs: Annotated[int, typer.Option(help="Epochs of each run.")] = 8,
) -> None:
    """Back-propagation on one process next to ADL on two, on real handwritten digits, in about a minute."""
    from offbeat.demo import show

    show(out, epochs, execute)


@app.command()
def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, comparisons, reproductions or benchmarks, "
                                   "or folders that hold several of them.")
    ],
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("report.html"),
    pictures: Annotated[
        Path | None, typer.Option(help="Write every chart into this folder too, as SVG and PNG.")
    ] = None,
) -> None:
    """Show runs in one HTML file: curves, errors, staleness, timelines, memory, partition."""
    from offbeat.report.draw import require

    require("altair", "vl_convert", "jinja2")
    from offbeat.report.page import write_report

    drawn = write_report(folders, out, pictures)
    print(f"{out}: {drawn} charts, {out.stat().st_size:,} bytes" + (f"; each in {pictures}" if pictures else ""))


checkpoints = typer.Typer(help="Look at the checkpoints of a run.", no_args_is_help=True, add_completion=False)
app.add_typer(checkpoints, name="checkpoint")


@checkpoints.command("ls")
def checkpoint_ls(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run.")],
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """List them, the oldest first."""
    from offbeat.checkpoint.show import show_list

    show_list(folder, as_json=as_json)


@checkpoints.command("show")
def checkpoint_show(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint, or a run for its newest.")],
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """What one holds, stage by stage."""
    from offbeat.checkpoint.show import show_one

    show_one(folder, as_json=as_json)


@checkpoints.command("verify")
def checkpoint_verify(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint, or a run for all of them.")],
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Read every byte and compare it with what was written."""
    from offbeat.checkpoint.show import show_verified

    show_verified(folder, as_json=as_json)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run, or one checkpoint.")],
    out: Annotated[Path, typer.Argument(help="The file to write.")] = Path("model.safetensors"),
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Write the newest model of a run as plain safetensors, by the names of the unsplit network."""
    from offbeat.checkpoint.export import export as write

    written = write(run, out)
    if as_json:
        print(json.dumps(written))
        return
    for note in written["notes"]:
        print(note, file=sys.stderr)
    print(f"{written['tensors']} tensors, {written['bytes']:,} bytes from {written['source']} in {written['out']}")


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if show:
        from offbeat import __version__

        print(__version__)
        raise typer.Exit


