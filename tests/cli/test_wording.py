"""One text per error: Python's arguments in the library, options on the command line; what it suggests works."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import typer
from command import Command, building_once
from test_cli import OPTIONS, SMALL

import offbeat
from offbeat.cli import app
from offbeat.cli.wording import ARGUMENT, in_options
from offbeat.errors import UserError
from offbeat.methods import METHODS, settings_of
from offbeat.runs.recipe import Recipe, make_recipe
from offbeat.runs.train import check_run

PACKAGE = Path(offbeat.__file__).parent
OPTION = re.compile(r"(?<![\w-])(--[a-z][\w-]*|-[KM]\b)")
OTHER_COMMAND = re.compile(r"'offbeat [^']*'|torchrun --[\w-]+")  # a command that a text names in full
NAMES = (
    {field.name for field in fields(Recipe)}
    | {name for method in METHODS for name in settings_of(method)}
    | set(signature(offbeat.train).parameters)
    | {"config"}
)


def context(command: str = "train", **given: Any) -> typer.Context:
    found = building_once()(app).commands[command]
    made = found.make_context(command, [], resilient_parsing=True)
    made.params.update(given)
    return made


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("batch_size=0: use an integer", "--batch-size 0: use an integer"),
        ("lr=-1.5, momentum=nan", "--lr -1.5, --momentum nan"),
        ("device='cuda' without a GPU", "--device cuda without a GPU"),
        ('out="a folder" is taken', "--out 'a folder' is taken"),
        ("K=4 and M=2.", "-K 4 and -M 2."),
        ("cuts=(5, 9) and milestones=[0.5]", "--cuts 5,9 and --milestones 0.5"),
        ("give the cuts: cuts=[...]", "give the cuts: --cuts ..."),
        ("compile=True, drop_last=False", "--compile, --no-drop-last"),
        ("give another folder as out=", "give another folder as --out"),
        ("leave out recipe= and out=, or not", "leave out --config and --out, or not"),
        ("see runs/K=4/x and adl:M=4,weights=stash", "see runs/K=4/x and adl:M=4,weights=stash"),
        ("nobody=4 has K==4", "nobody=4 has K==4"),
        ("window (default 'count'), recompute (default False)", "window (default count), recompute (default no)"),
        ("dsp takes no recompute (given: [1, 2])", "dsp takes no recompute (given: 1+2)"),
        ("or math.inf for no limit", "or inf for no limit"),
    ],
)
def test_arguments_are_printed_as_options(text, printed):
    assert in_options(text, context()) == printed


@pytest.mark.parametrize("command", ["demo", "compare"])
def test_a_stopped_run_of_another_command_is_resumed_by_train(command):
    text = "stopped by Ctrl-C after batch 4, with a checkpoint: continue with resume='runs/a b'"
    printed = text.replace("resume='runs/a b'", "offbeat train --resume 'runs/a b'")
    assert in_options(text, context(command)) == printed


@pytest.mark.parametrize(
    ("method", "text", "printed"),
    [
        ("gpipe:m=0", "m=0 micro-batches", "--method gpipe:m=0 micro-batches"),
        ("adl:M=0", "M=0 gradients per update", "--method adl:M=0 gradients per update"),
        ("adl", "M=0 gradients per update", "-M 0 gradients per update"),
        ("ddg", "barrier=True", "--method ddg:barrier=yes"),
        ("ald", "m=0", "m=0"),
    ],
)
def test_settings_without_an_option_are_printed_as_part_of_the_method(method, text, printed):
    assert in_options(text, context(method=method)) == printed


@pytest.mark.parametrize("name", OPTIONS)
def test_no_error_of_the_command_line_names_an_argument_of_python(offbeat: Command, name):
    arguments, _ = OPTIONS[name]
    base = SMALL if "--data" not in arguments else ("--model", "mlp", "--epochs", "1")
    printed = offbeat("train", *base, *arguments).err
    parameters = context().command.params
    options = {parameter.name for parameter in parameters}
    assert not [found[0] for found in ARGUMENT.finditer(printed) if found[1] in options], printed
    known = {option for parameter in parameters for option in (*parameter.opts, *parameter.secondary_opts)}
    assert set(re.findall(r"(?<!\S)--?[a-zA-Z][-a-z]*", printed)) <= known | {"--help", "--epoch"}, printed


def texts_of_errors(path: Path) -> list[str]:
    """The text of every string in a raise statement, and in a call that makes an error."""
    made = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise)
        or (isinstance(node, ast.Call) and re.search(r"(Error|Interrupted|Warning|unknown)$", ast.unparse(node.func)))
    ]
    parts = {part for node in made for part in ast.walk(node)}
    pieces = {piece for part in parts if isinstance(part, ast.JoinedStr) for piece in part.values}
    whole = [part for part in parts - pieces if isinstance(part, ast.JoinedStr | ast.Constant)]
    return ["".join(str(getattr(piece, "value", "")) for piece in getattr(text, "values", [text])) for text in whole]


def test_errors_of_the_library_name_no_options_of_the_command_line():
    checked, found = 0, []
    for path in PACKAGE.rglob("*.py"):
        if PACKAGE / "cli" not in path.parents:
            texts = texts_of_errors(path)
            checked += len(texts)
            found += [(path.name, text) for text in texts if OPTION.search(OTHER_COMMAND.sub("", text))]
    assert checked > 500
    assert found == []


BENCH = {"batch_size": 0, "K": 0, "M": 0, "repetitions": 0, "batches": 0, "micro_batches": (0,), "minutes": 0.0}
SCALING = BENCH.keys() - {"micro_batches"}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    *(("bench", {name: value}) for name, value in BENCH.items()),
    ("bench", {"K": 1}),
    ("bench", {"precision": "bf16"}),
    ("bench", {"methods": ("adl", "adl:M=2")}),
    *(("scaling", {name: BENCH[name]}) for name in sorted(SCALING)),
    ("scaling", {"stages": (0,)}),
    ("scaling", {"most_stages": 0}),
    *(("reproduce", {name: 0}) for name in ("seeds", "together", "minutes")),
    *(("compare", {name: 0}) for name in ("seeds", "jobs", "together", "M")),
    ("compare", {"jobs": 2, "together": 2}),
    ("compare", {"methods": ""}),
]


def start_study(study: str, given: dict[str, Any]) -> None:
    """The study with these arguments, as far as its first checks."""
    from offbeat.studies import compare, reproduce
    from offbeat.studies.bench.request import BenchRequest
    from offbeat.studies.bench.scaling import ScalingRequest

    if study == "compare":
        base = {"methods": "bp", "match": "batch", "seeds": 1, "M": 1, "jobs": 1, "chosen": {}, "out": None}
        compare.compare(**{**base, **given}, show=False)
    elif study == "reproduce":
        base = {"table": "curves", "seeds": 1, "minutes": 1, "together": 1}
        unset = dict.fromkeys(("only", "epochs", "data", "out"))
        reproduce.check(reproduce.ReproductionRequest(**{**base, **unset, **given}, running={}))
    else:
        (BenchRequest if study == "bench" else ScalingRequest)(**given).setting()


@pytest.mark.parametrize(("study", "given"), REQUESTS, ids=str)
def test_a_refused_study_names_its_arguments_and_options_on_the_command_line(study, given):
    with pytest.raises(UserError) as refused:
        start_study(study, given)
    message = str(refused.value)
    names = {found[1] for found in ARGUMENT.finditer(message)}
    assert set(given) <= names
    assert not OPTION.search(message)
    command = building_once()(app).commands["bench" if study == "scaling" else study]
    found = command.commands["scaling"] if study == "scaling" else command
    printed = in_options(message, found.make_context(study, [], resilient_parsing=True))
    assert not [found[0] for found in ARGUMENT.finditer(printed)]


SYNTHETIC = {"model": "mlp", "data": "synthetic", "samples": 64, "shape": (3, 8, 8), "epochs": 1}
WRONG: dict[str, dict[str, Any]] = {
    "K": {"K": 0},
    "M": {"M": 0},
    "m": {"method": "gpipe", "m": 0},
    "buffer": {"method": "dgl-async", "buffer": 0},
    "beta": {"method": "fdg", "beta": -1.0},
    "weights": {"weights": "stahs"},
    "engine": {"engine": "simulator"},
    "checkpoint mode": {"checkpoint_mode": "drain"},
    "checkpoint interval": {"checkpoint_every": "7"},
    "drained by the clock": {"checkpoint_every": "1min", "checkpoint_mode": "drained"},
    "lr": {"lr": float("nan")},
    "speeds": {"speeds": (1.0, 0.0), "K": 2},
    "milestones": {"milestones": (0.75, 0.5)},
    "seed": {"seed": -1},
    "epochs": {"epochs": 2**40},
    "shape": {"shape": (8, 8)},
    "a shape beyond any": {"shape": (3, 2**40, 8)},
    "a dropped last batch": {"drop_last": True, "batch_size": 65},
    "compile and fuse": {"compile": True, "fuse": True},
    "fuse": {"fuse": True},
    "tune": {"tune": True},
    "streams": {"engine": "streams"},
    "streams of heads": {"engine": "streams", "method": "dgl", "device": "cuda"},
    "cuda": {"device": "cuda"},
    "momentum": {"method": "nag-async", "momentum": 0.0},
    "trace": {"trace": 2**30},
}


def refusal(given: dict[str, Any]) -> str:
    try:
        check_run(make_recipe(**{**SYNTHETIC, **given}), out="nowhere")
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", WRONG)
def test_what_an_error_of_the_library_suggests_is_python_and_helps(name):
    message = refusal(WRONG[name])
    assert message, "not refused"
    assert "--" not in message
    for found in ARGUMENT.finditer(message):
        assert found[1] in NAMES
        if found[2] not in (None, "nan"):
            ast.parse(f"train({found[0]})")
    before, _, suggested = message.rpartition(": ")
    arguments = [found for found in ARGUMENT.finditer(suggested) if found[2]]
    for found in arguments:
        if found[0] not in before:
            assert refusal({**WRONG[name], found[1]: ast.literal_eval(found[2])}) != message


WORDS_OF_TEXT = re.compile(r"\b(yes|none)\b|\bno\b(?! \w)|\d\+\d")  # how the text of a method writes values


@pytest.mark.parametrize("method", METHODS)
def test_a_setting_of_the_wrong_type_is_refused_with_values_of_python(method):
    for name in signature(METHODS[method]).parameters:
        with pytest.raises(UserError) as refused:
            METHODS[method](**{name: {1.5}})
        assert not WORDS_OF_TEXT.search(str(refused.value))
    with pytest.raises(UserError) as refused:
        METHODS[method](unheard_of=True)
    for default in re.findall(r"\(default (.*?)\)", str(refused.value)):
        ast.literal_eval(default)


@pytest.mark.parametrize(
    ("method", "given", "said"),
    [
        ("adl", {"recompute": "yes"}, "recompute='yes': use True, False or a list of stage numbers such as [1, 2]"),
        ("ddg", {"barrier": 1}, "barrier=1: use True or False"),
        ("pipemare", {"anneal": "none"}, "anneal='none': use an integer or None"),
        ("adl", {"corrector": 3}, "corrector=3: use text such as 'sc' or 'lwp+sc', correctors, or None"),
        ("dni", {"synthesiser": 3}, "synthesiser=3: use a function, 'package.module:name' or None"),
        ("dsp", {"recompute": True}, "dsp takes no recompute (given: True): leave it out"),
    ],
)
def test_errors_about_settings_name_values_of_python(method, given, said):
    with pytest.raises(UserError) as refused:
        make_recipe(method=method, **given)
    assert said in str(refused.value)


@pytest.mark.filterwarnings("always::offbeat.errors.Unbalanced")
def test_a_warning_of_uneven_cuts_names_options(offbeat: Command):
    done = offbeat("train", "--data", "synthetic", "--model", "resnet8", "-K", 4, "--batch-size", 8, "--dry-run")
    assert done.code == 0
    assert "uneven cuts" in done.err
    assert "--units layers" in done.err
    assert "units=" not in done.err
