"""Write docs/methods/: a page for each method, from its file in offbeat/methods, its declaration and the clock.

python benchmarks/method_pages.py              write them
python benchmarks/method_pages.py --check      only compare, and fail where they are not current
"""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from page import ROOT, prose, publish

from offbeat.cli.options import OneMethod
from offbeat.correctors import CORRECTORS, Corrector
from offbeat.correctors.optimizer_rules import RULES, OptimizerRule, SelfCompensatingRule
from offbeat.correctors.registry import settings_of as corrector_settings
from offbeat.describe import MethodDescription, describe, module_text, possible, show_methods
from offbeat.method import Method
from offbeat.methods import METHODS, named, settings_of
from offbeat.report.formatting import markdown
from offbeat.settings import shown

FOLDER = ROOT / "docs/methods"
COMMAND = "python benchmarks/method_pages.py"
STAGES = (2, 4, 8)  # K of the tables


# ---- markdown


def escaped(line: str) -> str:
    """Prose of a docstring as it stands: markdown must not read its signs, but for what stands between backticks."""
    parts = line.split("`")
    return "`".join(re.sub(r"([*_<\[|])", r"\\\1", part) if not place % 2 else part for place, part in enumerate(parts))


def body(text: str) -> list[str]:
    """A docstring without its first line: prose escaped, equations and drawings (indented) as they are."""
    return [line if line.startswith("    ") else escaped(line) for line in text.splitlines()[2:]]


def source_of(name: str) -> str:
    """The file that declares the method, from the root of the repository."""
    return METHODS[name].__module__.replace(".", "/") + ".py"


# ---- sections


def short_form(setting: str) -> str:
    """The option of the command line that sets it by itself, where there is one."""
    options = {
        field.name: "-M" if field.name == "M" else f"--{field.name.replace('_', '-')}" for field in fields(OneMethod)
    }
    return f"`{options[setting]}`" if setting in options else ""


def settings(name: str) -> list[str]:
    make, takes = METHODS[name], settings_of(name)
    first = str(inspect.getdoc(make)).splitlines()[0]
    called = f"`offbeat.{make.__name__}`: {escaped(first)}"
    if not takes:
        return ["## Settings", "", called, "", "It has no settings.", ""]
    rows = [
        [f"`{each.name}`", each.allowed, f"`{shown(each.default)}`", short_form(each.name)] for each in takes.values()
    ]
    example = f"`--method {name}:{','.join(map(str, list(takes.values())[:2]))}`"
    return [
        "## Settings",
        "",
        called,
        "",
        f"On the command line as in {example}:",
        "",
        markdown(["setting", "allowed", "default", "short form"], rows),
        "",
    ]


def facts(description: MethodDescription) -> list[str]:
    unchanged = "those of its forward: no update comes between them"
    answers = {
        "published": description.reference,
        "locks left": ", ".join(description.locks_left) or "none",
        "lag of the backward": f"{description.lag} batches",
        "gradients per update": f"{description.M}",
        "weights of the backward": unchanged if description.weights == "-" else description.weights,
        "gradient": {"above": "from the next stage", "local": "of a local loss"}.get(
            description.feedback, description.feedback
        ),
        "correctors": ", ".join(description.correctors) or "none",
    }
    return ["## What it declares", "", markdown(["property", "value"], [[*pair] for pair in answers.items()]), ""]


def plus_one(lag: str) -> str:
    return lag.removesuffix("-1") if lag.endswith("-1") else f"{lag}+1"


def formulas(method: Method, description: MethodDescription) -> str:
    """Staleness, versions and batches held, as the declaration has them."""
    takes_M = "M" in description.takes
    late = description.lag != "0"
    bracketed = f"({description.lag})" if "(" not in description.lag else description.lag
    over = f"{bracketed}/M" if takes_M else description.lag
    staleness = "1" if method.forward == "before" else over if late else "0"
    if method.forward == "before":
        versions = "2"
    elif method.weights == "stash" and late:
        versions = f"ceil({over})+1" if takes_M else plus_one(description.lag)
    else:
        versions = "1"
    parts, held = (
        ("micro-batches", "m") if "m" in description.takes else ("batches", plus_one(description.lag) if late else "1")
    )
    return (
        f"For stage k of K: mean staleness in updates {staleness}; parameter versions {versions}, including the "
        f"newest; {parts} between forward and backward {held}."
    )


def numbers(name: str, method: Method, description: MethodDescription) -> list[str]:
    """The formulas evaluated, from stage 1 up, and the clock's speed-up."""

    def each(values: list[Any]) -> str:
        return " ".join(f"{value:g}" for value in values)

    rows = []
    for K in [K for K in STAGES if possible(method, K)] or [1]:
        ks = range(1, K + 1)
        columns = ([ask(k, K) for k in ks] for ask in (method.staleness, method.versions, method.held))
        rows.append([str(K), *(each(column) for column in columns)])
    parts = "micro-batches" if method.m > 1 else "batches"
    head = ["K", "mean staleness, stage 1 first", "versions", f"{parts} held"]
    ideal = ", ".join(f"{value:.2f} at K={K}" for K, value in description.speed_up.items() if value is not None)
    workers = "workers, each with the whole model" if method.workers > 1 else "equal stages"
    auxiliary = ", no time for the auxiliary networks" if method.head else ""
    defaults = ", ".join(
        f"{letter}={value}"
        for letter, value in (("M", method.M), ("m", method.m), ("N", method.workers))
        if letter in description.takes
    )
    return [
        "## Staleness and memory",
        "",
        prose(escaped(formulas(method, description)), f"With {defaults}:" if defaults else "Values:"),
        "",
        markdown(head, rows),
        "",
        prose(
            f"Predicted speed-up over back-propagation on one worker (K {workers}, a backward that takes as long as",
            f"two forwards, no communication{auxiliary}): {ideal}. This is computed, not measured; measurements are in",
            "[results](../results.md).",
        ),
        "",
    ]


def drawing(name: str) -> list[str]:
    return [
        "## Timeline",
        "",
        f"Printed by `offbeat methods {name}` (`-K` and `-M` set K and M). F: forward, B: backward, U: update; @v:",
        "version of the weights; LoS: staleness of the gradient in updates.",
        "",
        "```text",
        show_methods(name, K=None, M=None)["timeline"],
        "```",
        "",
    ]


# ---- pages


def page(name: str) -> str:
    description, method = describe(name), named(name)
    make, source = METHODS[name], source_of(name)
    lines = [
        f"# {name}: {description.title}",
        "",
        f"Generated by `{COMMAND}` from `{source}`; do not edit.",
        "",
        *body(module_text(make)),
        "",
        "## In use",
        "",
        "```sh",
        f"offbeat train --method {name} {'-K 4 ' if possible(method, 4) else ''}...",
        "```",
        "",
        *settings(name),
        *facts(description),
        *numbers(name, method, description),
        *drawing(name),
    ]
    return "\n".join(lines).rstrip() + "\n"


def index() -> str:
    rows = []
    for name in METHODS:
        description = describe(name)
        locks = ", ".join(description.locks_left) or "none"
        rows.append(
            [
                f"[{name}]({name}.md)",
                description.title,
                description.reference,
                description.lag,
                str(description.M),
                locks,
                description.feedback,
            ]
        )
    head = ["method", "title", "published", "lag", "M", "locks left", "gradient from"]
    return "\n".join(
        [
            "# Methods",
            "",
            f"Generated by `{COMMAND}` from `offbeat/methods`; do not edit.",
            "",
            prose(
                "Each method is one file; all run on the same engines. The lag is the number of batches between a",
                "forward and its backward at stage k of K. See [choosing K, M and a method](../choosing.md) for which",
                "to use, and [adding a method](../adding-a-method.md) for your own. The correctors that can be",
                "combined with asynchronous methods have [a page of their own](correctors.md).",
            ),
            "",
            markdown(head, rows),
            "",
        ]
    )


# ---- correctors


def forms(kind: type[Corrector]) -> dict[str, Corrector]:
    """The corrector by its text; one that has forms (a setting with a choice of words) in each of them."""
    hints = get_type_hints(kind, vars(sys.modules[kind.__module__]) | {"Need": Any, "Tensor": Any})
    for field in fields(kind):
        if get_origin(hints[field.name]) is Literal:
            return {
                f"{kind.name}:{field.name}={choice}": kind(**{field.name: choice})
                for choice in get_args(hints[field.name])
            }
    return {kind.name: kind()}


def works_with(corrector: Corrector, rule: type[OptimizerRule] | None) -> str:
    return "yes" if {*corrector.needs} <= {*(rule.provides if rule else ())} else "no"


def corrector_section(name: str) -> list[str]:
    kind = CORRECTORS[name]
    text, _, example = str(inspect.getdoc(kind)).partition(">>> ")
    first, *rest = text.splitlines()
    takes = ", ".join(f"`{setting}={shown(field.default)}`" for setting, field in corrector_settings(kind).items())
    return [
        f"## {name}: `offbeat.{kind.__name__}`",
        "",
        escaped(first),
        *(line if line.startswith("    ") else escaped(line) for line in rest),
        *(f"    {line}" for line in f">>> {example}".splitlines()),
        "",
        prose(
            f"Changes: {', '.join(kind.changes)}. Weights: {', '.join(kind.supported_weights)}.",
            f"Settings: {takes}." if takes else "No settings.",
        ),
        "",
    ]


def correctors_page() -> str:
    rules: dict[str, type[OptimizerRule] | None] = {f"`{name}`": rule for name, rule in RULES.items()}
    rules |= {"`SelfCompensating`": SelfCompensatingRule, "any other": None}
    rows = [
        [f"`{text}`", *(works_with(corrector, rule) for rule in rules.values())]
        for kind in CORRECTORS.values()
        for text, corrector in forms(kind).items()
    ]
    lines = [
        "# Correctors",
        "",
        f"Generated by `{COMMAND}` from `offbeat/correctors`; do not edit.",
        "",
        prose(
            "A corrector compensates for the delay of gradients. It is given to a method, as in",
            '`offbeat.ADL(M=4, corrector="lookahead+sc:extra=1")` or `--method adl:corrector=lwp:fraction=0.5`.',
            "Settings follow a colon each, the first one also without its name. The delay is counted in updates,",
            "lag / M.",
        ),
        "",
        "## Correctors and optimizers",
        "",
        prose(
            "Which corrector works with which optimizer. SGD needs a momentum between 0 and 1, without dampening,",
            "nesterov and maximize; Adam, AdamW and NAdam must not have amsgrad or maximize. The column",
            "`SelfCompensating` is for optimizers that implement `offbeat.correctors.SelfCompensating`; for `nag`",
            "their parameter groups must have `momentum` and `nesterov`. These conditions hold for correctors that",
            "do not work with any other optimizer.",
        ),
        "",
        markdown(["corrector", *rules], rows),
        "",
        *(line for name in CORRECTORS for line in corrector_section(name)),
    ]
    return "\n".join(lines).rstrip() + "\n"


def pages() -> dict[Path, str]:
    return {
        FOLDER / "index.md": index(),
        FOLDER / "correctors.md": correctors_page(),
        **{FOLDER / f"{name}.md": page(name) for name in METHODS},
    }


if __name__ == "__main__":
    wanted = dict(sorted(pages().items()))
    publish(wanted, COMMAND, left_over=set(FOLDER.glob("*.md")) - set(wanted))
