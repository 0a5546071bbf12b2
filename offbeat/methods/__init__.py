"""All methods by name: one file per paper in this folder, and methods of other packages.

A public function in a file of this folder that is annotated to return a `Method` declares a method; there is no list to
add it to. Other packages declare their methods with the entry point group "offbeat.methods".

May import errors, seeds, core, what describes methods, heads and settings.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, wraps
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from offbeat.correctors import CorrectorLike
from offbeat.errors import UserError, first_line, unknown
from offbeat.method import Method, StalenessWarmup
from offbeat.settings import LARGEST, Setting, declared, listed, shown, split

if TYPE_CHECKING:  # type checkers do not run the discovery below
    from offbeat.methods.adl import ADL
    from offbeat.methods.adl_1f1b import ADL1F1B
    from offbeat.methods.asgd import ASGD
    from offbeat.methods.bp import BP
    from offbeat.methods.dc_asgd import DCASGD
    from offbeat.methods.ddg import DDG
    from offbeat.methods.dgl import DGL
    from offbeat.methods.dgl_async import AsyncDGL
    from offbeat.methods.dni import DNI
    from offbeat.methods.dsp import DSP
    from offbeat.methods.fdg import FDG
    from offbeat.methods.fr import FR
    from offbeat.methods.gpipe import GPipe
    from offbeat.methods.mostafa import Mostafa
    from offbeat.methods.nag_async import NAGAsync
    from offbeat.methods.pb import PB
    from offbeat.methods.pipedream import PipeDream
    from offbeat.methods.pipemare import PipeMare
    from offbeat.methods.predsim import Pred, PredSim, Sim
    from offbeat.methods.spectrain import SpecTrain
    from offbeat.methods.two_bw import TwoBW

Make = Callable[..., Method]

GROUP = "offbeat.methods"  # of entry points
AUTO = "auto"  # the name of the method that is chosen for a model and a device, see recommended.py
# The order in tables; other methods follow these.
ORDER = (
    "bp",
    "gpipe",
    "ddg",
    "fr",
    "fdg",
    "dsp",
    "adl",
    "dgl",
    "dgl-async",
    "dni",
    "mostafa",
    "pred",
    "sim",
    "predsim",
    "asgd",
    "dc-asgd",
    "pipedream",
    "2bw",
    "adl-1f1b",
    "pipemare",
    "spectrain",
    "pb",
    "nag-async",
)


# ---- discovery


def makers(module: ModuleType) -> list[Make]:
    """The functions of a module that declare a method: public, defined there, and annotated to return a Method."""
    found: list[Make] = []
    for name, value in vars(module).items():
        if name.startswith("_") or not inspect.isfunction(value) or value.__module__ != module.__name__:
            continue
        if value.__annotations__.get("return") in (Method, "Method"):
            found.append(value)
    return found


def of_folder() -> dict[str, Make]:
    """The methods declared in this folder, by their names on the command line."""
    modules = [import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    named: dict[str, Make] = {}
    for make in [make for module in modules for make in makers(module)]:
        name = make().name
        if name in named:
            raise TypeError(f"{named[name].__module__} and {make.__module__} both declare the method {name!r}")
        named[name] = checked(make)
    return {name: named[name] for name in sorted(named, key=lambda name: _place(name))}


def checked(make: Make) -> Make:
    """The function of a method, which refuses arguments that its signature does not allow in one line."""
    signature = inspect.signature(make)

    @wraps(make)
    def method(*args: Any, **given: Any) -> Method:
        takes = declared(make)
        try:
            bound = signature.bind(*args, **given)
        except TypeError as error:
            raise UserError(f"{make.__name__} {error}: {listed(takes)}") from None
        for name, value in bound.arguments.items():
            takes[name].check(value)
        return make(*args, **given)

    return method


def _place(name: str) -> tuple[int, str]:
    return (ORDER.index(name), "") if name in ORDER else (len(ORDER), name)


METHODS = of_folder()
globals().update({make.__name__: make for make in METHODS.values()})

# The methods that cut a network, whose speed the timeline predicts; also without the barriers of the papers.
DECLARED: dict[str, Make] = {
    **{name: make for name, make in METHODS.items() if make().workers == 1},  # others do not cut it
    "ddg-dataflow": lambda: replace(METHODS["ddg"](barrier=False), name="ddg-dataflow"),
    "fr-dataflow": lambda: replace(METHODS["fr"](barrier=False), name="fr-dataflow"),
}


@cache
def add_packages() -> dict[str, str]:
    """Add the methods of other packages, once; returns the reason for each entry point that cannot be used.

    Called only when a name is unknown or all names are needed, since the search takes a tenth of a second.
    """
    from importlib.metadata import entry_points

    failed: dict[str, str] = {}
    for entry in entry_points(group=GROUP):
        package = entry.dist.name if entry.dist else entry.value
        try:
            make = entry.load()
            method = make()
            declared(make)
            if not isinstance(method, Method):
                raise TypeError(f"{entry.value} returns no Method")
            if method.name in METHODS:
                raise TypeError(f"there is a method {method.name} already")
        except Exception as error:  # a broken package must not stop the methods of this one
            failed[entry.name] = f"of package {package} cannot be used ({type(error).__name__}: {first_line(error)})"
            continue
        METHODS[method.name] = make
        if method.workers == 1:
            DECLARED[method.name] = make
    return failed


# ---- settings


def settings_of(name: str) -> dict[str, Setting]:
    """The settings of a method, as declared by its function, and `corrector` where gradients come from the next stage.

    >>> [str(setting) for setting in settings_of("bp").values()]
    ['M=1', 'window=count', 'weights=stash', 'pipelined=no', 'recompute=no', 'corrector=none']
    """
    if name == AUTO:
        return {**settings_of("adl-1f1b"), "latency": LATENCY}
    if name not in METHODS and name in (failed := add_packages()):
        raise UserError(f"method {name} {failed[name]}: update or uninstall the package")
    if name not in METHODS:
        raise unknown("method", str(name), [AUTO, *METHODS])
    found, method = declared(METHODS[name]), METHODS[name]()
    if method.feedback != "above" or method.m > 1:
        return found
    late = method.workers == 1 and method.lag(1, 2) > 0
    found = found if "corrector" in found else {**found, "corrector": CORRECTOR}
    return {**found, "staleness_warmup": STALENESS_WARMUP} if late else found


def _late(*, corrector: CorrectorLike = None, staleness_warmup: StalenessWarmup = None) -> None:
    """Declares the settings that all methods with late gradients have."""


def _chosen(*, latency: float | None = None) -> None:
    """Declares the setting that only method auto has: seconds that a message takes, one way."""


CORRECTOR, STALENESS_WARMUP = declared(_late).values()
LATENCY = declared(_chosen)["latency"]


def with_settings(name: str, settings: Mapping[str, Any]) -> Method:
    """The method of that name with these settings.

    A setting that the method does not have is an error, unless its value is what the method does anyway.

    >>> with_settings("adl", {"M": 2}).M, with_settings("dsp", {"weights": "replay"}).weights
    (2, 'replay')
    """
    takes = settings_of(name)
    if name == AUTO:
        raise UserError(
            "method auto is chosen for a model and a device: use it in Pipeline, make_recipe, train, compare or plan"
        )
    function = METHODS[name]
    own = declared(function)
    for setting in own.keys() & settings.keys():
        own[setting].check(settings[setting])
    method = function(**{setting: own[setting].value(settings[setting]) for setting in own if setting in settings})
    for setting, value in settings.items():
        if setting in own:
            continue
        if setting == "corrector":
            CORRECTOR.check(value)
            method = method.corrected(value)
        elif setting == "staleness_warmup" and setting in takes:
            continue  # last: it takes up the others
        elif not hasattr(method, setting) or shown(getattr(method, setting)) != shown(value):
            raise UserError(f"{name} takes no {setting} (given: {value!r}): leave it out; {listed(takes)}")
    return with_staleness_warmup(method, settings.get("staleness_warmup"))


def with_staleness_warmup(method: Method, given: StalenessWarmup) -> Method:
    """The method after that many updates of pipelined back-propagation with the same M; or after the methods of
    (method, updates) pairs, which may be text.

    In text, methods have M, window, weights, recompute and correctors of this one, where they take them, and
    back-propagation is pipelined.

    >>> grows = with_staleness_warmup(METHODS["adl"](M=4), "bp@200+adl-1f1b@300")
    >>> [(method.name, method.M, updates) for method, updates in grows.staleness_warmup]
    [('bp', 4, 200), ('adl-1f1b', 4, 300)]
    """
    if given is None or given == 0:
        return method
    if method.staleness_warmup:
        raise UserError(f"staleness_warmup={given!r} for a method that has one: give it once")
    STALENESS_WARMUP.check(given)
    if isinstance(given, int) and given < 1:
        raise UserError(f"staleness_warmup={given}: use a number of updates from 1 up")
    if isinstance(given, int):
        return replace(
            method, staleness_warmup=((METHODS["bp"](M=method.M, pipelined=True, recompute=method.recompute), given),)
        )
    phases = [_phase(method, part, given) for part in given.split("+")] if isinstance(given, str) else list(given)
    for pair in phases:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], Method):
            raise UserError(
                f"staleness_warmup with {pair!r}: use pairs (method, updates) such as (offbeat.BP(M=4), 500)"
            )
    return replace(method, staleness_warmup=tuple(phases))


def _phase(method: Method, part: str, text: str) -> tuple[Method, int]:
    name, _, updates = part.strip().partition("@")
    if not updates.isdecimal() or int(updates) > LARGEST:
        raise UserError(
            f"staleness_warmup={text!r}: use the number of updates of back-propagation, or methods with numbers of "
            "updates, as in 'bp@200+adl-1f1b@300'"
        )
    try:
        takes = settings_of(name).keys()
        same = {setting: getattr(method, setting) for setting in takes & {"M", "window", "weights", "recompute"}}
        phase = with_settings(name, {"M": method.M} | same | dict.fromkeys(takes & {"pipelined"}, True))
        return (phase.corrected(method.correctors) if phase.lag(1, 2) else phase), int(updates)
    except UserError as error:
        raise UserError(f"staleness_warmup={text!r}: {error}") from None


def named(name: str, **settings: Any) -> Method:
    """The method of that name; a setting of None means the default of the method.

    >>> named("adl", M=2, weights=None).M
    2
    """
    return with_settings(name, {setting: value for setting, value in settings.items() if value is not None})


def parsed(text: str, **besides: Any) -> tuple[str, dict[str, Any]]:
    """The name and settings of a method given as text, together with those given as arguments that are not None.

    >>> parsed("gpipe:m=8,recompute=yes"), parsed("adl:weights=hybrid", M=2)
    (('gpipe', {'m': 8, 'recompute': True}), ('adl', {'weights': 'hybrid', 'M': 2}))
    """
    name, texts = split(text)
    takes = settings_of(name)
    settings = {setting: takes[setting].read(value) if setting in takes else value for setting, value in texts.items()}
    for setting, value in besides.items():
        if value is None:
            continue
        if setting in settings and shown(settings[setting]) != shown(value):
            there = f"{shown(settings[setting])} in {text!r}"
            raise UserError(f"{setting} is {there} and {shown(value)} given separately: give it once")
        settings.setdefault(setting, value)
    return name, settings


__all__ = [
    "ADL",
    "ADL1F1B",
    "ASGD",
    "AUTO",
    "BP",
    "DCASGD",
    "DDG",
    "DECLARED",
    "DGL",
    "DNI",
    "DSP",
    "FDG",
    "FR",
    "LATENCY",
    "METHODS",
    "PB",
    "AsyncDGL",
    "GPipe",
    "Mostafa",
    "NAGAsync",
    "PipeDream",
    "PipeMare",
    "Pred",
    "PredSim",
    "Sim",
    "SpecTrain",
    "TwoBW",
    "add_packages",
    "named",
    "parsed",
    "settings_of",
    "with_settings",
    "with_staleness_warmup",
]
