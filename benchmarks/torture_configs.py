"""Configurations good and bad, drawn at random, through `offbeat train --dry-run` in one process.

Which of them are valid is stated here once more, from what the documentation says (the help of the options, `offbeat
methods`, `offbeat models`), without a call into offbeat. A valid one must exit with 0 and say nothing on stderr; an
invalid one with 2, in one line; about a few nothing is documented (`unclear`): they may end either way. Nothing may
write, hang, start a process or show a traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import random
import re
import signal
import sys
import tempfile
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SECONDS = 60  # for one configuration, on a busy machine
VALID, INVALID, UNCLEAR = "valid", "invalid", "unclear"
LONG = "9" * 400

# ---- what is documented

UNITS = {"mlp": 5, "resnet8": 5, "resnet14": 8, "resnet20": 11}  # offbeat models: largest K
SMALLEST = {"mlp": 1, "resnet8": 4, "resnet14": 4, "resnet20": 4}  # pixels
# offbeat methods: gradients an update, weights ('-': none are kept), feedback, correctors, settings taken
METHODS: dict[str, tuple[int, str, str, tuple[str, ...], tuple[str, ...]]] = {
    "bp": (1, "-", "above", (), ("M", "window", "weights")),
    "gpipe": (1, "-", "above", (), ("m", "recompute")),
    "ddg": (1, "stash", "above", (), ("barrier", "weights", "recompute", "corrector")),
    "fr": (1, "replay", "above", (), ("barrier", "corrector")),
    "fdg": (1, "stash", "above", ("shrink",), ("beta", "weights", "recompute", "corrector")),
    "dsp": (1, "replay", "above", (), ("corrector",)),
    "adl": (4, "stash", "above", (), ("M", "window", "weights", "recompute", "corrector")),
    "dgl": (1, "-", "local", (), ()),
    "dgl-async": (1, "-", "local", (), ("buffer",)),
    "dni": (1, "-", "synthesiser", (), ("conditional",)),
    "mostafa": (1, "-", "local", (), ()),
    "pred": (1, "-", "local", (), ()),
    "sim": (1, "-", "local", (), ()),
    "predsim": (1, "-", "local", (), ("beta",)),
    "asgd": (1, "stash", "above", (), ("N", "recompute", "corrector")),
    "dc-asgd": (1, "stash", "above", ("dc",), ("N", "recompute")),
    "pipedream": (1, "stash", "above", (), ("weights", "recompute", "corrector")),
    "2bw": (8, "stash", "above", (), ("M", "recompute", "corrector")),
    "adl-1f1b": (4, "stash", "above", (), ("M", "window", "weights", "recompute", "corrector")),
    "pipemare": (1, "hybrid", "above", ("t2",), ("M", "corrector")),
    "spectrain": (1, "hybrid", "above", ("spec",), ("recompute", "corrector")),
    "pb": (1, "hybrid", "above", ("lwp", "sc"), ("weights", "recompute", "corrector")),
    "nag-async": (1, "stash", "above", ("nag",), ("recompute", "corrector")),
}
BATCH, DIGITS, SYNTHETIC = 32, 1437, 2048  # default samples of a batch; samples of an epoch
# what each corrector sets, the weights that it works with, and whether a number behind a colon is right
CORRECTORS: dict[str, tuple[tuple[str, ...], tuple[str, ...], Any]] = {
    "lwp": (("forward weights",), ("stash", "hybrid", "replay"), lambda number: True),
    "sc": (("step",), ("stash", "hybrid", "replay"), lambda number: 0 <= number < math.inf),
    "dc": (("gradient",), ("stash",), lambda number: 0 <= number < math.inf),
    "t1": (("rate",), ("stash", "hybrid", "replay"), lambda number: number >= 1 and number.is_integer()),
    "t2": (("backward weights",), ("hybrid",), lambda number: 0 < number < 1),
    "nag": (("step",), ("stash", "hybrid", "replay"), lambda number: 0 < number < 1),
    "lookahead": (("weights after a step",), ("stash", "hybrid", "replay"), lambda number: 0 <= number < math.inf),
    "shrink": (("incoming gradient",), ("stash", "hybrid", "replay"), lambda number: 0 < number <= 1),
    "spec": (("forward weights", "backward weights"), ("hybrid", "stash"), None),
    "auto": (("weights after a step", "rate", "step"), ("stash", "hybrid", "replay"), None),
}

# ---- what is drawn: for each option values that can be right, and values that cannot

OPTIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "--model": (
        ("mlp", "mlp", "resnet8", "resnet8", "resnet14", "resnet20"),
        ("resnet9", "", "ResNet8", "a\nb", "vgg"),
    ),
    "--data": (("synthetic", "synthetic", "digits"), ("mnist", "", "cifar10", "imagefolder", "Digits")),
    "--data-dir": ((), ("nowhere", ".", "")),
    "--shape": (
        ("3,8,8", "1x8x8", "1,16,16", "3,32,32", "1,8,24", "2,5,7"),
        ("3,8", "0,8,8", "a,b,c", "3,8,8,8", "-1,8,8", "", "1.5,8,8", "3;8;8", "1,0,8"),
    ),
    "--classes": (("10", "2", "1", "7"), ("0", "-3", "ten", "2.5", "")),
    "--samples": (("64", "1", "1000", "33"), ("0", "-1", "1e3", "many")),
    "--data-workers": (("0", "1", "2"), ("-1", "x", "1.5")),
    "--method": (tuple(METHODS), ("ald", "ADL", "", "ddg-dataflow", "adl,bp")),
    "-M": (("1", "2", "3", "4", "8"), ("0", "-1", "four", "2.0", "")),
    "--weights": (("stash", "hybrid", "replay"), ("stashed", "", "HYBRID")),
    "--window": (("count", "aligned"), ("counted", "")),
    "--corrector": (
        (
            "sc",
            "lwp",
            "lwp+sc",
            "dc",
            "dc:0.1",
            "t1:500",
            "t2",
            "nag",
            "shrink:0.5",
            "spec",
            "sc+t1",
            "sc:2",
            "lookahead+sc",
        ),
        ("sx", "sc+nag", "spec:1", "t1:0", "t2:2", "dc:-1", "sc:x", "shrink:0", "lwp+spec", "nag:1"),
    ),
    "m": (("1", "2", "4", "100"), ("0", "-2", "half")),  # names without a dash are settings within --method
    "beta": (("0.5", "1", "0.99"), ("-0.5", "nan", "inf", "b", "2")),
    "N": (("1", "2", "4"), ("0", "-1", "x")),
    "buffer": (("1", "2", "5"), ("0", "-1", "x")),
    "recompute": (("yes", "no", "1"), ("maybe", "0", "1+400")),
    "barrier": (("yes", "no"), ("maybe", "2")),
    "conditional": (("yes", "no"), ("maybe",)),
    "-K": (("1", "2", "3", "4", "5"), ("0", "-1", "two", "400", "2.5", "")),
    "--engine": (("simulate", "processes"), ("threads", "", "process")),
    "--device": (("cpu",), ("tpu", "", "cuda:0")),
    "--units": (("blocks", "layers"), ("block", "")),
    "--partition": (("flops",), ("time", "")),
    "--cuts": (("1", "2", "1,2", "1,3", "2,3,4", "1,2,3,4"), ("0", "2,1", "1,1", "a", "99", "-1", "1;2")),
    "--speeds": (("1", "1,1", "1,0.5", "1,1,0.5", "1,1,1,1"), ("0,1", "-1", "x", "nan,1", "inf,1", "0")),
    "--threads-per-stage": (("1", "2"), ("0", "-1", "x")),
    "--epochs": (("1", "2", "300"), ("0", "-1", "1.5", "x")),
    "--batch-size": (("1", "8", "32", "5000"), ("0", "-8", "x", "")),
    "--lr": (("0.1", "0", "1e-3", "10"), ("-0.1", "nan", "inf", "fast")),
    "--momentum": (("0.9", "0.5"), ("-0.1", "nan", "x")),
    "--weight-decay": (("0", "1e-4"), ("-1e-4", "inf", "x")),
    "--warmup": (("0", "3", "0.5"), ("-1", "nan", "x")),
    "--milestones": (("0.5", "0.5,0.75", "0.3,0.6,0.9"), ("0.75,0.5", "0", "-0.5", "x", "nan", "0.5,inf")),
    "--schedule": (("steps", "cosine"), ("linear", "")),
    "--floor": (("0", "0.1", "1"), ("-0.1", "1.5", "nan", "x")),
    "--clip-norm": (("1", "0.1"), ("-1", "nan", "x")),
    "--seed": (("0", "7", "123456"), ("-1", "x", "1.5")),
    "--checkpoint-every": (
        ("500b", "1e", "0.5e", "10min", "30s", "7b", " 7b "),
        ("7", "0b", "-5b", "1.5b", "b", "1h", "", "1e5", "0e", "nane", "infs"),
    ),
    "--checkpoint-mode": (("in-flight", "drained"), ("drain", "", "inflight")),
    "--keep": (("1", "3", "100"), ("-1", "all")),
    "--on-nan": (("stop", "skip", "rollback"), ("ignore", "", "Stop")),
    "--max-restarts": (("0", "3"), ("-1", "x")),
    "--out": (("new", "deep/er/folder"), ("taken", "file/inside", "n" * 300)),
    "--config": (
        ("good.json",),
        (
            "nowhere.json",
            "broken.json",
            "empty.json",
            "types.json",
            "names.json",
            "list.json",
            "deep.json",
            "bytes.json",
            "number.json",
            "taken",
        ),
    ),
    "--resume": ((), ("nowhere", "good.json", "taken")),
}
ODD = (("extra",), ("--bogus",), ("--bogus", "3"), ("--lr",), ("-Q",), ("--learning-rate", "0.1"))
EXTREME = (
    ("--checkpoint-every", LONG + "e"),
    ("--checkpoint-every", LONG + "min"),
    ("--samples", LONG),
    ("-K", LONG),
    ("--lr", "1e400"),
    ("--classes", "1" + "0" * 30),
    ("--batch-size", "1" + "0" * 25),
    ("--config", "huge.json"),
    ("--shape", f"3,{LONG[:30]},8"),
    ("--seed", LONG),
    ("--epochs", LONG),
    ("--milestones", ""),
    ("--cuts", ""),
    ("--speeds", ""),
    ("--config", "nan.json"),
    ("--corrector", ""),
    ("--keep", LONG),
    ("m", LONG),
    ("-M", LONG),
    ("--classes", "1000000000"),
    ("--shape", "3,100000,100000"),
)


@dataclass
class Configuration:
    """Options as they were drawn, in their order, and what else stands on the command line."""

    given: dict[str, str] = field(default_factory=dict)
    odd: tuple[str, ...] = ()
    extreme: bool = False

    def arguments(self) -> list[str]:
        return [*command(self.given), *self.odd]


def command(given: dict[str, str]) -> list[str]:
    """The arguments, with the settings of the method in its text."""
    settings = ",".join(f"{name}={value}" for name, value in given.items() if not name.startswith("-"))
    options = {option: value for option, value in given.items() if option.startswith("-")}
    if settings:
        options["--method"] = f"{options.get('--method', 'adl')}:{settings}"
    return ["train", *(part for pair in options.items() for part in pair), "--dry-run", "--json"]


def drawn(seed: int, number: int) -> Configuration:
    """Half of them from values that can be right, the others with one to three that cannot."""
    draw = random.Random(f"{seed}/{number}")
    made = Configuration()
    chosen = ["--model", "--data", "--method", "-K"]
    chosen += draw.sample([option for option in OPTIONS if option not in chosen], draw.choice([0, 1, 2, 3, 4, 6, 9]))
    for option in chosen:
        right = OPTIONS[option][0]
        if right:
            made.given[option] = draw.choice(right)
    if draw.random() < 0.6:
        repair(made, draw)
    if draw.random() < 0.45:
        for option in draw.sample(list(OPTIONS), draw.choice([1, 1, 1, 2, 3])):
            made.given[option] = draw.choice(OPTIONS[option][1])
    if draw.random() < 0.04:
        made.odd = draw.choice(ODD)
    if draw.random() < 0.06:
        option, value = draw.choice(EXTREME)
        made.given[option] = value
        made.extreme = True
    if "--model" not in made.given or "--data" not in made.given:
        made.given |= {"--model": "mlp", "--data": "digits"}
    return made


def repair(made: Configuration, draw: random.Random) -> None:
    """Leave out what the method or the data do not take, so that many are valid."""
    given = made.given
    takes = METHODS[given["--method"]][4]
    for option, answer in ANSWERS.items():
        if answer not in takes:
            given.pop(option, None)
    if given["--data"] != "synthetic":
        given.pop("--classes", None)
        given.pop("--samples", None)
        if given.get("--shape") not in (None, "1,16,16", "1x8x8", "1,8,24"):
            given["--shape"] = "1,16,16"
    if int(given.get("--batch-size", BATCH)) > _samples(given):
        given["--batch-size"] = "1"
    if given["--method"] in ("asgd", "dc-asgd"):
        given["-K"] = "1"
    K = int(given["-K"])
    if "--cuts" in given:
        given["--cuts"] = ",".join(map(str, sorted(draw.sample(range(1, 5), K - 1))))
        given.pop("--units", None)
        if K == 1:
            del given["--cuts"]
    if "--speeds" in given:
        given["--speeds"] = ",".join(draw.choice(["1", "0.5", "2"]) for _ in range(K))
    if given.get("--checkpoint-mode") == "drained" and given.get("--checkpoint-every", "1e")[-1] in "sn":
        given["--checkpoint-every"] = "1e"


ANSWERS = {
    "-M": "M",
    "--weights": "weights",
    "--window": "window",
    "--corrector": "corrector",
    **{name: name for name in ("m", "beta", "N", "buffer", "recompute", "barrier", "conditional")},
}

# ---- which are valid


def whole(text: str, least: int) -> bool:
    return bool(re.fullmatch(r"[+-]?\d+", text.strip())) and int(text) >= least


def real(text: str, allowed: Any = lambda number: 0 <= number < math.inf) -> bool:
    try:
        return bool(allowed(float(text)))
    except ValueError:
        return False


def reals(text: str) -> list[float] | None:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        return None


def judged(made: Configuration) -> tuple[str, str]:
    """valid, invalid or unclear, and the reason."""
    if made.odd:
        return INVALID, f"{made.odd} stands there"
    given = made.given
    for option, value in given.items():
        if option in ALONE and not ALONE[option](value) and not (made.extreme and (option, value) in EXTREME):
            return INVALID, f"{option} {value!r}"
    if "--resume" in given:
        return INVALID, "nothing to resume"
    unclear = "extreme" if made.extreme else ""
    if unclear:
        return UNCLEAR, unclear
    config = CONFIG if "--config" in given else {}
    if given.get("--method", CONFIG["--method"]) != CONFIG["--method"]:  # another method starts from its own settings
        config = {option: value for option, value in config.items() if option not in ANSWERS}
    return together({**config, **given})


def every(text: str) -> bool:
    found = re.fullmatch(r"(\d+(\.\d+)?)(b|e|s|min)", text.strip())
    return bool(found) and float(found[1]) > 0 and (found[3] != "b" or float(found[1]).is_integer())  # type: ignore[index]


def corrector(text: str) -> bool:
    """Whether each part has a name and a number that fits, and no two set the same."""
    set_by: list[str] = []
    for part in text.split("+"):
        name, colon, number = part.partition(":")
        if name not in CORRECTORS:
            return False
        sets, _, fits = CORRECTORS[name]
        if colon and (fits is None or not real(number, fits)):
            return False
        set_by += sets
    return len(set_by) == len(set(set_by))


CHOICES = (  # options whose right values are all among those that are drawn
    *("--model", "--data", "--method", "--weights", "--window", "--engine", "--device", "--units", "--partition"),
    *("--schedule", "--checkpoint-mode", "--on-nan", "--out", "--config", "recompute", "barrier", "conditional"),
)
FROM_1 = ("--classes", "--samples", "-M", "m", "N", "buffer", "--threads-per-stage", "--epochs", "--batch-size")
FROM_0 = ("--data-workers", "--seed", "--keep", "--max-restarts")
NUMBERS = ("beta", "--lr", "--momentum", "--weight-decay", "--warmup", "--clip-norm")
ALONE: dict[str, Any] = {  # what can be said of one option
    **{option: OPTIONS[option][0].__contains__ for option in CHOICES},
    **dict.fromkeys(FROM_1, lambda text: whole(text, 1)),
    **dict.fromkeys(FROM_0, lambda text: whole(text, 0)),
    **dict.fromkeys(NUMBERS, real),
    "--data-dir": lambda text: False,  # which those data sets do not take
    "--shape": lambda text: bool(re.fullmatch(r"[1-9]\d*([,x][1-9]\d*){2}", text)),
    "--corrector": corrector,
    "-K": lambda text: whole(text, 1) and int(text) < 400,
    "--cuts": lambda text: bool(re.fullmatch(r"\d+(,\d+)*", text)),
    "--speeds": lambda text: bool(reals(text)) and all(0 < speed < math.inf for speed in reals(text) or ()),
    "--milestones": lambda text: (
        (found := reals(text)) is not None
        and found == sorted(found)
        and all(0 < fraction < math.inf for fraction in found)
    ),
    "--floor": lambda text: real(text) and float(text) <= 1,
    "--checkpoint-every": every,
}
CONFIG = {"--model": "mlp", "--data": "digits", "--method": "adl", "-K": "2", "-M": "2"}  # good.json


def together(given: dict[str, str]) -> tuple[str, str]:
    """What can be said of options with each other."""
    model, data, name, K = given["--model"], given["--data"], given.get("--method", "adl"), int(given.get("-K", "1"))
    for reason in (_data(model, data, given), _cutting(model, K, given), _answers(name, K, given)):
        if reason:
            return reason
    if given.get("--checkpoint-mode") == "drained" and given.get("--checkpoint-every", "e").strip()[-1] in "sn":
        return INVALID, "drained by the clock"
    unused = {"steps": "--floor", "cosine": "--milestones"}[given.get("--schedule", "steps")]
    if unused in given:
        return INVALID, "a setting of the other schedule"
    return VALID, ""


def _data(model: str, data: str, given: dict[str, str]) -> tuple[str, str] | None:
    if data == "digits" and ("--classes" in given or "--samples" in given):
        return INVALID, "digits have their own classes and samples"
    if int(given.get("--batch-size", BATCH)) > _samples(given):
        return INVALID, "batches of more samples than an epoch has"
    default = "1,8,8" if data == "digits" else "3,32,32"
    C, H, W = (int(part) for part in re.split("[,x]", given.get("--shape", default)))
    if data == "digits" and (C != 1 or H % 8 or W % 8):
        return INVALID, "a shape that digits cannot have"
    return (INVALID, "images too small for the network") if min(H, W) < SMALLEST[model] else None


def _samples(given: dict[str, str]) -> int:
    """Of an epoch."""
    return DIGITS if given["--data"] == "digits" else int(given.get("--samples", SYNTHETIC))


def _cutting(model: str, K: int, given: dict[str, str]) -> tuple[str, str] | None:
    units, kind = UNITS[model], given.get("--units")
    if kind != "layers" and units < K:
        return (INVALID, "more stages than blocks") if kind == "blocks" else (UNCLEAR, "stages within blocks")
    if "--speeds" in given and len(given["--speeds"].split(",")) != K:
        return INVALID, "speeds for another K"
    if "--cuts" in given:
        cuts = [int(part) for part in given["--cuts"].split(",")]
        if len(cuts) != K - 1 or cuts != sorted(set(cuts)) or not cuts[0] >= 1:
            return INVALID, "cuts for another K, or not increasing"
        if kind == "layers":
            return UNCLEAR, "how many layers there are to cut between"
        if cuts[-1] >= units:
            return INVALID, "cuts behind the end"
    return None


def _answers(name: str, K: int, given: dict[str, str]) -> tuple[str, str] | None:
    """A method refuses what it does not take, unless it is what it does anyway."""
    M, weights, _, _, takes = METHODS[name]
    anyway = {"-M": str(M), "--weights": weights, "--window": "count", "m": "1", "recompute": "no", "barrier": "no"}
    unclear = ""
    for option, answer in ANSWERS.items():
        if option not in given or answer in takes or answer == "corrector" or given[option] == anyway.get(option):
            continue
        if (weights == "-" and option == "--weights" and given[option] == "stash") or (option, given[option]) == (
            "N",
            "1",
        ):
            unclear = "weights of a method that keeps none, or one worker"
            continue
        if name == "gpipe" and option == "m":
            continue
        return INVALID, f"{name} takes no {answer}"
    beta = float(given["beta"]) if "beta" in given else 0.5
    if beta > 1 or (name == "fdg" and beta == 0) or (name == "predsim" and beta in (0, 1)):
        return INVALID, "beta beyond 1, or of predsim one that leaves out one of its two losses"
    used = given.get("--weights", weights) if "weights" in takes else weights
    if given.get("recompute", "no") != "no" and used not in ("stash", "-"):
        return INVALID, "recompute needs stashed weights"
    if name in ("asgd", "dc-asgd") and K > 1:
        return INVALID, "workers hold the whole model"
    if name == "2bw" and int(given.get("-M", "8")) < K - 1:
        return INVALID, "two versions are not enough"
    return _corrected(name, given) or ((UNCLEAR, unclear) if unclear else None)


def _corrected(name: str, given: dict[str, str]) -> tuple[str, str] | None:
    _, weights, feedback, own, _ = METHODS[name]
    if "--corrector" not in given:
        names = list(own)
    else:
        asked = [part.partition(":")[0] for part in given["--corrector"].split("+")]
        if feedback != "above" or (name == "gpipe" and given.get("m") != "1"):
            return INVALID, "gradients that are not late"
        if name in ("bp", "gpipe"):
            return UNCLEAR, "correctors of gradients that are not late"
        names = asked if name == "pb" else [*own, *asked]
    sets = [question for each in names for question in CORRECTORS[each][0]]
    if len(sets) != len(set(sets)):
        return INVALID, "two correctors set the same"
    if any(given.get("--weights", weights) not in CORRECTORS[each][1] for each in names):
        return INVALID, "a corrector for other weights"
    one_way = ("ddg", "fr", "pipedream", "adl-1f1b", "spectrain", "nag-async")
    if "spec" in names and (name not in one_way or given.get("-M", str(METHODS[name][0])) != "1"):
        return INVALID, "speculation counts the updates of 1F1B"
    return (INVALID, "2bw sets the forward weights") if name == "2bw" and "forward weights" in sets else None


# ---- trying them


def folder(place: Path) -> None:
    """The files that configurations name."""
    (place / "taken").mkdir(parents=True)
    (place / "taken/config.json").write_text("{}")
    (place / "file").write_text("not a folder")
    recipe: dict[str, Any] = {"model": "mlp", "data": "digits", "method": "adl", "K": 2, "M": 2}
    for name, content in {
        "good": {"recipe": recipe},
        "types": {"recipe": {**recipe, "K": "two"}},
        "list": [recipe],
        "number": 3,
        "names": {"recipe": {**recipe, "stages": 2}},
        "huge": {"recipe": {**recipe, "K": 10**40, "seed": 10**40}},
        "nan": {"recipe": {**recipe, "lr": math.nan, "milestones": [math.inf]}},
    }.items():
        (place / f"{name}.json").write_text(json.dumps(content))
    (place / "broken.json").write_text('{"recipe": {"model": "ml')
    (place / "empty.json").write_text("")
    (place / "deep.json").write_text("[" * 200_000)
    (place / "bytes.json").write_bytes(bytes(range(256)))


def contents(place: Path) -> set[str]:
    return {str(path) for path in place.rglob("*")}


def tried(arguments: list[str]) -> tuple[int | str, str, str]:
    """Exit code (or what was raised instead), stdout and stderr of the command in this process."""
    from offbeat import cli

    def ring(number: int, frame: object) -> None:
        raise TimeoutError(f"more than {SECONDS} s")

    before, argv = signal.signal(signal.SIGALRM, ring), sys.argv
    code: int | str = "it returned"
    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["offbeat", *arguments]
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else str(error.code)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        code = "".join(traceback.format_exception(error))[-1500:]
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        sys.argv = argv
    return code, out.getvalue(), err.getvalue()


def fault(expected: str, code: int | str, out: str, err: str) -> str | None:
    """What is wrong with how it ended; a warning of uneven cuts is not."""
    err = "".join(line for line in err.splitlines(keepends=True) if not line.startswith("offbeat: uneven cuts: "))
    if code not in (0, 2):
        return f"ended with {code}"
    if code == 2 and not (err.startswith("offbeat: ") and err.count("\n") == 1 and err.endswith("\n") and not out):
        return f"exit code 2 but not one line: {err[-500:]!r}, stdout {out[-200:]!r}"
    if "Traceback" in err:
        return f"a traceback: {err[-500:]}"
    if code == 0 and (err or not isinstance(json.loads(out), dict)):
        return f"exit code 0, but it said {err[-500:]!r}, {out[-200:]!r}"
    wanted = {VALID: (0,), INVALID: (2,), UNCLEAR: (0, 2)}[expected]
    return None if code in wanted else f"{expected}, but exit code {code}: {err.strip()[-300:]}"


def attempt(count: int, seed: int, place: Path, say: Any = None) -> tuple[Counter[str], list[dict[str, Any]]]:
    """Try so many; how many of which kind, and those that did not end as they must."""
    folder(place)
    before, here = contents(place), Path.cwd()
    found: Counter[str] = Counter()
    faults: list[dict[str, Any]] = []
    os.chdir(place)
    try:
        for number in range(count):
            made = drawn(seed, number)
            expected, reason = judged(made)
            code, out, err = tried(made.arguments())
            found[expected] += 1
            found[f"exit code {code if isinstance(code, int) else 'none'}"] += 1
            wrong = fault(expected, code, out, err)
            if contents(place) != before:
                wrong = f"wrote {sorted(contents(place) ^ before)}"
                before = contents(place)
            if wrong:
                faults.append({"number": number, "arguments": made.arguments(), "reason": reason, "fault": wrong})
            if say and (wrong or number % 100 == 99):
                say(f"{number + 1} of {count}: {dict(found)}" + (f"; {faults[-1]}" if wrong else ""))
    finally:
        os.chdir(here)
    return found, faults


def run(options: argparse.Namespace) -> bool:
    from start import say
    from torture import write

    from offbeat.runs import launch

    def no_process(*_: Any, **__: Any) -> None:
        raise AssertionError("a dry run started workers")

    launch.launch = no_process
    for name in ("RANK", "WORLD_SIZE", launch.ERRORS):
        os.environ.pop(name, None)
    with tempfile.TemporaryDirectory(prefix="torture-configs-") as place:
        found, faults = attempt(options.count, options.seed, Path(place) / "here", say)
    print(json.dumps({**found, "faults": len(faults)}, indent=1))
    write(
        options.out,
        {
            "settings": {"count": options.count, "seed": options.seed},
            "good": not faults,
            "counts": dict(found),
            "wanted": "valid: exit code 0; invalid: exit code 2 and one line; no traceback, no hang",
            "faults": faults,
        },
    )
    return not faults
