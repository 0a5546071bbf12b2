"""`offbeat methods`: all methods in a table, or one method in detail."""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from offbeat.errors import UserError
from offbeat.method import Method
from offbeat.methods import METHODS, add_packages, named, settings_of
from offbeat.report.text import timeline_text
from offbeat.settings import shown
from offbeat.timeline import balanced, speed_up

LOCKS = ("forward", "backward", "update")
K_SHOWN = 4  # stages, for the staleness and versions in the table
SPEEDS = (4, 8)  # stages, for the ideal speed-ups
DRAWN_K, DRAWN_BATCHES = 3, (6, 5, 4, 3, 2, 1)  # of a timeline; the first number of batches that fits
LONGEST_LINE = 118
MOST_DRAWN = 1000  # stages of a timeline
LEGEND = f"""locks: F forward, B backward, U update
LoS, versions: mean staleness in updates, and versions of the weights, of stage 1 of {K_SHOWN}
  (of one stage for methods that do not cut the network, and give each worker a copy)
x at K: predicted speed-up of K workers over BP on one
  (equal stages, B = 2F, no communication, no time for auxiliary networks)
'offbeat methods NAME' shows one method with its equations and timeline"""


@dataclass(frozen=True, kw_only=True)
class MethodDescription:
    """A method with its default settings.

    settings    name, allowed values and default of each setting
    K           number of stages for staleness, versions and held, which are lists from stage 1 on: 4 if possible
    speed_up    predicted, over back-propagation on one worker, by K: equal stages, B = 2F, no communication, steady
                state; for a method that does not cut the network, of K workers
    """

    name: str
    title: str
    reference: str
    locks_left: list[str]
    locks_removed: list[str]
    lag: str
    M: int
    weights: str
    feedback: str
    correctors: list[str]
    takes: list[str]
    settings: list[dict[str, Any]]
    K: int
    staleness: list[float]
    versions: list[int]
    held: list[int]
    speed_up: dict[int, float | None]


def describe(name: str) -> MethodDescription:
    """The declaration of a method, and what follows from it."""
    takes = settings_of(name)
    method = named(name)
    K = max(K for K in range(1, K_SHOWN + 1) if possible(method, K))
    ks = range(1, K + 1)
    return MethodDescription(
        name=name,
        title=method.title,
        reference=method.reference,
        locks_left=list(method.locks),
        locks_removed=[lock for lock in LOCKS if lock not in method.locks],
        lag=lag_text(method.lag),
        M=method.M,
        weights=weights_text(method, K),
        feedback=method.feedback,
        correctors=[corrector.name for corrector in method.correctors],
        takes=list(inspect.signature(METHODS[name]).parameters),
        K=K,
        settings=[
            {"name": setting.name, "allowed": setting.allowed, "default": _plain(setting.default)}
            for setting in takes.values()
        ],
        staleness=[method.staleness(k, K) for k in ks],
        versions=[method.versions(k, K) for k in ks],
        held=[method.held(k, K) for k in ks],
        speed_up={K: ideal_speed_up(name, K) for K in SPEEDS},
    )


def _plain(value: Any) -> Any:
    """The value as a type that JSON has."""
    return value if value is None or isinstance(value, bool | int | float | str) else shown(value)


def possible(method: Method, K: int) -> bool:
    """Whether the method can have K stages."""
    return method.limit is None or method.limit(K) is None


def ideal_speed_up(name: str, K: int) -> float | None:
    """Predicted speed-up of K workers with one stage each, or with a copy of the network each."""
    method = named(name, N=K if "N" in settings_of(name) else None)
    if possible(method, K):
        return speed_up(method, balanced(K))
    return speed_up(method, balanced(1)) if method.workers == K else None


def weights_text(method: Method, K: int) -> str:
    """The weights of a backward; "-" if none can change between forward and backward."""
    if not any(method.lag(k, K) for k in range(1, K + 1)):
        return "-"
    return method.weights if method.forward == "newest" else f"{method.weights} ({method.forward})"


def lag_text(lag: Callable[[int, int], int]) -> str:
    """The lag as a formula: the docstring of its function if that is one, a(K-k)+c if it has that form, else words.

    >>> from offbeat.methods import lags
    >>> lag_text(lags.none), lag_text(lags.round_trip), lag_text(lambda k, K: 3), lag_text(lambda k, K: K - k + 1)
    ('0', '2(K-k)', '3', 'K-k+1')
    """
    words = str(inspect.getdoc(lag) or getattr(lag, "__name__", "?")).splitlines()[0].rstrip(".")
    if lag.__doc__ and " " not in words:
        return words
    constant, slope = lag(1, 1), lag(1, 2) - lag(2, 2)
    stages = ((k, K) for K, k in itertools.product(range(1, 9), repeat=2) if k <= K)
    if any(lag(k, K) != slope * (K - k) + constant for k, K in stages):
        return words
    if not slope:
        return str(constant)
    times = "K-k" if slope == 1 else f"{slope}(K-k)"
    return f"{times}{constant:+d}" if constant else times


def module_text(make: Callable[..., Method]) -> str:
    """The docstring of the file that declares the method."""
    function = make.func if isinstance(make, partial) else make
    return inspect.cleandoc(sys.modules[function.__module__].__doc__ or "")


def timeline_of(name: str, *, K: int, M: int | None) -> str:
    """The timeline of a method with K equal stages, as text."""
    method = named(name, M=M)
    method.check(K)
    drawn = [timeline_text(method, balanced(K), batches=batches) for batches in DRAWN_BATCHES]
    return next((text for text in drawn if max(map(len, text.splitlines())) <= LONGEST_LINE), drawn[-1])


def show_methods(name: str | None, *, K: int | None, M: int | None) -> Any:
    """The data that the command prints, as a table or as JSON."""
    if name is None:
        if K is not None or M is not None:
            raise UserError("K= and M= draw the timeline of one method: name it, such as 'adl'")
        add_packages()
        return [asdict(describe(each)) for each in METHODS]
    described = describe(name)
    stages = K if K is not None else max(K for K in range(1, DRAWN_K + 1) if possible(named(name), K))
    if not 1 <= stages <= MOST_DRAWN:
        raise UserError(f"K={stages}: use a whole number from 1 to {MOST_DRAWN}")
    return {**asdict(described), "text": module_text(METHODS[name]), "timeline": timeline_of(name, K=stages, M=M)}


def print_methods(data: Any) -> None:
    """Print the table of all methods, or one method with its text and timeline."""
    console = Console(highlight=False)
    if isinstance(data, list):
        described = [MethodDescription(**entry) for entry in data]
        whole = table(described, wide=True)
        fits = console.measure(whole, options=console.options.update(width=1000)).maximum <= console.width
        console.print(whole if fits else table(described, wide=False))
        console.print(LEGEND)
        return
    for text in (data["text"], summary(data), data["timeline"]):
        console.print(text, soft_wrap=True, markup=False)
        console.print()


def summary(data: dict[str, Any]) -> str:
    """The properties of one method in a few lines."""

    def each(values: list[Any]) -> str:
        return " ".join(f"{value:g}" for value in values)

    speeds = [f"{value:.2f} at K={K}" for K, value in data["speed_up"].items() if value is not None]
    lines = {
        "name": f"{data['name']}: {data['title']}, {data['reference']}",
        "locks left": ", ".join(data["locks_left"]) or "none",
        "lag": f"{data['lag']} batches, M = {data['M']}",
        "weights": data["weights"],
        "gradient": f"from {data['feedback']}" if data["feedback"] == "above" else data["feedback"],
        "correctors": ", ".join(data["correctors"]) or "none",
        "settings": "none",
        f"K={data['K']}": f"staleness {each(data['staleness'])}; versions {each(data['versions'])}; "
        f"batches held {each(data['held'])}",
        "ideal speed-up": ", ".join(speeds) or "-",
    }
    width = max(map(len, lines))
    if data["settings"]:
        written = [(f"{each['name']}={shown(each['default'])}", each["allowed"]) for each in data["settings"]]
        longest = max(len(setting) for setting, _ in written)
        below = f"\n{' ' * width}  "
        lines["settings"] = below.join(f"{setting.ljust(longest)}  {allowed}" for setting, allowed in written)
        lines["settings"] += f"{below}as in 'offbeat train --method {data['name']}:{written[0][0]}'"
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in lines.items())


def table(described: list[MethodDescription], *, wide: bool) -> Table:
    """One line per method; columns that 'offbeat methods NAME' also shows are left out if the terminal is narrow."""
    made = Table(
        title="Methods, with their own settings", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), title_justify="left"
    )
    left, right, more = ["name", "locks\nremoved", "lag", "weights"], ["M", "LoS", "ver-\nsions"], []
    if wide:
        left, more = [*left, "feedback"], ["reference"]
    for name in (*left, *right, *(f"x at\nK={K}" for K in SPEEDS), *more):
        made.add_column(name, justify="left" if name in (*left, *more) else "right", no_wrap=True)
    for entry in described:
        removed = " ".join(lock[0].upper() for lock in entry.locks_removed)
        speeds = ["-" if value is None else f"{value:.2f}" for value in entry.speed_up.values()]
        made.add_row(
            entry.name,
            removed or "none",
            entry.lag,
            entry.weights,
            *([entry.feedback] if wide else []),
            str(entry.M),
            f"{entry.staleness[0]:g}",
            str(entry.versions[0]),
            *speeds,
            *([entry.reference] if wide else []),
        )
    return made
