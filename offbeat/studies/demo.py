"""The demonstration: the same recipe by BP on one core, BP on all cores, and ADL on two processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from offbeat.runs.launch import cores
from offbeat.runs.recipe import Recipe, make_recipe
from offbeat.runs.record import check_free
from offbeat.runs.train import Result, train

STAGES = 2


def recipes(epochs: int) -> dict[str, Recipe]:
    """The three runs; they differ in nothing but the method and where it runs."""
    common: dict[str, Any] = {
        "model": "resnet20",
        "data": "digits",
        "shape": (1, 16, 16),
        "epochs": epochs,
        "warmup": 1.0,
        "M": 2,
        "lr": 0.1,
    }
    return {
        "BP, 1 core": make_recipe(**common, method="bp", threads_per_stage=1),
        f"BP, {cores()} cores": make_recipe(**common, method="bp", threads_per_stage=cores()),
        f"ADL, {STAGES} processes": make_recipe(**common, method="adl", K=STAGES, threads_per_stage=1),
    }


def show(out: Path | None, epochs: int) -> None:
    """Run the three and print one table."""
    console, planned = Console(highlight=False), recipes(epochs)
    folder = out or _free(Path("runs/demo"))
    check_free(folder)
    if note := busy():
        console.print(note, soft_wrap=True)
    results: dict[str, Result] = {}
    for name, recipe in planned.items():
        console.print(f"[bold]{name}[/bold]: {recipe.model} on handwritten digits, b={recipe.batch_size}, M={recipe.M}")
        slug = name.lower().replace(",", "").replace(" ", "-").replace("=", "")
        result = train(recipe, out=folder / slug, show=True)
        assert result is not None
        results[name] = result
    console.print(table(results))
    console.print(f"To see curves, staleness and timelines: offbeat report {folder}", soft_wrap=True)


def busy() -> str | None:
    """A line for a machine that other programs use: BP on all cores then waits in every layer for the slowest core."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load < cores() / 2:
        return None
    return (
        f"other programs use this machine (load {load:.1f} on {cores()} cores): speeds say little, and BP on all cores "
        "may take many times as long as on one"
    )


def table(results: dict[str, Result]) -> Table:
    """Error, speed and staleness of each run; speed-ups against the first two."""
    one_core, all_cores = (run["samples_per_second"] for run in list(results.values())[:2])
    caption = "staleness of each stage's gradients, in updates"
    made = Table(title="The same recipe, three ways", caption=caption, box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    made.add_column("", no_wrap=True)
    columns = ("error", "samples/s", "x BP\n1 core", f"x BP\n{cores()} cores", "staleness\nmeasured", "by\nformula")
    for column in columns:
        made.add_column(column, justify="right", no_wrap=True)
    for name, run in results.items():
        speed = run["samples_per_second"]
        made.add_row(
            name,
            f"{run['error']:.2f}%",
            f"{speed:,.0f}",
            f"{speed / one_core:.2f}",
            f"{speed / all_cores:.2f}",
            levels(run["staleness"]),
            levels(run["staleness_formula"]),
        )
    return made


def levels(stages: list[float]) -> str:
    return " ".join(f"{level:.2f}" for level in stages)


def _free(folder: Path) -> Path:
    """A folder of that name that does not exist yet."""
    count, free = 1, folder
    while free.exists():
        count += 1
        free = folder.with_name(f"{folder.name}-{count}")
    return free
