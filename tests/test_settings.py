"""Methods and their settings: found in the folder and in packages, read from text, listed with their defaults."""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Literal

import pytest
from command import check_refused
from fixed_times import few_laps
from torch import nn

import offbeat
from offbeat import methods
from offbeat.errors import UserError
from offbeat.method import Method
from offbeat.methods import METHODS, lags, named, parsed, settings_of, with_settings
from offbeat.settings import declared, shown, split_list

PACKAGE = Path(offbeat.__file__).parent


def synthesiser(shape: tuple[int, ...], classes: int) -> nn.Module:
    """What dni:synthesiser=test_settings:synthesiser names."""
    return nn.Identity()


# ---- which methods there are


def test_every_file_of_the_folder_that_declares_a_method_is_listed():
    texts = {path.stem: path.read_text() for path in (PACKAGE / "methods").glob("[a-z]*.py")}
    declaring = {name for name, text in texts.items() if re.search(r"^(def [A-Z].*|\)) -> Method:", text, re.M)}
    assert {make.__module__.rpartition(".")[2] for make in METHODS.values()} == declaring
    assert len(METHODS) >= 23


def test_what_type_checkers_are_shown_is_found_in_the_folder():
    for path in (PACKAGE / "__init__.py", PACKAGE / "methods" / "__init__.py"):
        blocks = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.If)]
        imported = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
        own = [node for node in imported if str(node.module).startswith("offbeat.methods")]
        names = {alias.name for node in own for alias in node.names}
        assert len(names) >= 23
        assert names <= {make.__name__ for make in METHODS.values()}
        for name in names:
            assert getattr(offbeat, name) is getattr(methods, name)


def test_drawing_needs_no_torch_and_reads_no_packages():
    code = (
        "import sys, offbeat; assert 'offbeat.methods' not in sys.modules; from offbeat.clock import draw; "
        "draw(offbeat.ADL(M=2), 2, range(4)); "
        "print('torch' in sys.modules, 'importlib.metadata' in sys.modules)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert printed.stdout == "False False\n", printed.stderr


def Waiting(M: int = 4, *, slack: int = 2) -> Method:  # noqa: N802
    """Of another package."""
    return Method(name="waiting", title="waits longer", lag=lambda k, K: 2 * (K - k) + slack * (k < K), M=M)


def Broken() -> Method:  # noqa: N802
    raise RuntimeError("no such library")


def Taken() -> Method:  # noqa: N802
    return Method(name="adl", lag=lags.none)


@pytest.fixture
def packages(monkeypatch, tmp_path):
    """A package that is installed and declares methods, in a folder that Python searches."""
    installed = tmp_path / "installed" / "others-1.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(
        "[offbeat.methods]\nwaiting = test_settings:Waiting\nbroken = test_settings:Broken\n"
        "gone = test_settings:Gone\nadl = test_settings:Taken\n"
    )
    monkeypatch.syspath_prepend(str(installed.parent))
    monkeypatch.setattr(methods, "METHODS", dict(METHODS))
    monkeypatch.setattr(methods, "DECLARED", dict(methods.DECLARED))
    assert {entry.name for entry in metadata.entry_points(group=methods.GROUP)} >= {"waiting", "broken"}
    methods.add_packages.cache_clear()
    yield
    methods.add_packages.cache_clear()


def test_a_method_of_another_package_is_found_by_its_entry_point(packages):
    method = with_settings(*parsed("waiting:M=2,slack=3"))
    assert (method.M, method.lag(1, 2)) == (2, 5)
    assert offbeat.Waiting is sys.modules["test_settings"].Waiting
    assert "waiting" in methods.DECLARED
    with pytest.raises(
        UserError, match=r"waiting takes no beta \(given: 1\): leave it out; its settings are M \(default 4\), slack"
    ):
        with_settings("waiting", {"beta": 1})


def test_a_package_that_cannot_be_used_leaves_all_other_methods_alone(packages):
    assert named("adl").lag(1, 2) == 2
    with pytest.raises(UserError, match=r"method broken of package others cannot be used \(RuntimeError: no such lib"):
        named("broken")
    with pytest.raises(UserError, match=r"method gone of package others cannot be used \(AttributeError"):
        named("gone")
    assert methods.add_packages().keys() == {"broken", "gone", "adl"}
    assert "there is a method adl already" in methods.add_packages()["adl"]


def test_an_undeclared_name_is_no_attribute(packages):
    with pytest.raises(AttributeError, match="Nobody"):
        offbeat.Nobody  # noqa: B018


# ---- settings


def test_settings_are_those_of_the_signature_with_its_defaults():
    for name, make in METHODS.items():
        parameters = inspect.signature(make).parameters
        takes = settings_of(name)
        assert list(takes)[: len(parameters)] == list(parameters)
        assert {*takes} - {*parameters} <= {"corrector", "staleness_warmup"}
        assert {setting: takes[setting].default for setting in parameters} == {
            setting: parameter.default for setting, parameter in parameters.items()
        }


@pytest.mark.parametrize("name", METHODS)
def test_every_setting_of_every_method_can_be_given_as_text(name):
    for setting in settings_of(name).values():
        text = {"synthesiser": "test_settings:synthesiser"}.get(setting.name, shown(setting.default))
        _, settings = parsed(f"{name}:{setting.name}={text}")
        made = with_settings(name, settings)
        assert made.name == name
        if setting.name != "synthesiser":
            assert settings == {setting.name: setting.default}


def test_a_function_with_other_types_is_read_as_its_annotations_say():
    def make(a: int | None = 3, b: Literal["x", 2] = "x", c: str = "", d=1.5, *, e: float | bool = True) -> None: ...

    takes = declared(make)
    read = {"a": ("none", "7"), "b": ("2", "x"), "c": ("none", "7"), "d": ("2",), "e": ("no", "0.5")}
    assert {name: tuple(takes[name].read(text) for text in texts) for name, texts in read.items()} == {
        "a": (None, 7),
        "b": (2, "x"),
        "c": ("none", "7"),
        "d": (2.0,),
        "e": (False, 0.5),
    }
    assert takes["a"].allowed == "an integer or none"
    for name, wrong in {"a": True, "b": 3, "c": 1, "d": float("nan"), "e": "x"}.items():
        with pytest.raises(UserError):
            takes[name].check(wrong)
    assert str(declared(partial(make, a=5))["a"]) == "a=5"


def test_a_list_of_methods_keeps_settings_with_their_method():
    assert split_list("bp,adl:M=2,corrector=dc:0.1, gpipe:m=8:recompute=yes,,fr") == [
        "bp",
        "adl:M=2,corrector=dc:0.1",
        "gpipe:m=8:recompute=yes",
        "fr",
    ]


def test_a_pipeline_takes_a_method_with_settings_as_text():
    def pipe(method: str, **more: int) -> offbeat.Pipeline:
        return offbeat.Pipeline(
            [nn.Linear(2, 2), nn.Linear(2, 1)],
            method=method,
            loss=nn.functional.mse_loss,
            optimizer=lambda p: offbeat_sgd(p),
            **more,
        )

    made = pipe("adl:M=2,weights=hybrid").method
    assert (made.M, made.weights) == (2, "hybrid")
    with pytest.raises(UserError, match="M is 2 in 'adl:M=2' and 3 given separately: give it once"):
        pipe("adl:M=2", M=3)


def offbeat_sgd(parameters):
    import torch

    return torch.optim.SGD(parameters, lr=0.1)


# ---- on the command line


@pytest.mark.parametrize("name", METHODS)
def test_methods_name_lists_every_setting_with_its_default(offbeat, name):
    printed = offbeat("methods", name).out
    page = json.loads(offbeat("methods", name, "--json").out)
    assert [each["name"] for each in page["settings"]] == list(settings_of(name))
    for setting in settings_of(name).values():
        assert re.search(rf"\b{re.escape(str(setting))} +{re.escape(setting.allowed)}\n", printed)


def test_methods_reports_packages_that_cannot_be_used(packages, offbeat, monkeypatch):
    monkeypatch.setattr("offbeat.describe.METHODS", methods.METHODS)
    printed = offbeat("methods")
    assert printed.code == 0
    assert "waiting" in printed.out
    assert sorted(line.split(" (")[0] for line in printed.err.splitlines()) == [
        f"offbeat: method {name} of package others cannot be used" for name in ("adl", "broken", "gone")
    ]


def test_a_plan_takes_a_method_with_settings(offbeat):
    network = ("--model", "mlp", "--shape", "1,4,4", "-K", 2, "--batch-size", 4)
    small = ("plan", *network, "--partition", "flops", "--json")
    with few_laps():
        plan = json.loads(offbeat(*small, "--method", "adl:M=2,weights=hybrid").out)
    assert (plan["M"], [stage["versions"] for stage in plan["stages"]]) == (2, [1, 1])
    check_refused(offbeat, (*small, "--method", "adl:M=2", "-M", 4), "M is 2 in 'adl:M=2' and 4", "give it once")
    check_refused(
        offbeat, (*small, "--method", "adl:beta=2"), "adl takes no beta", "M (default 4), window (default count)"
    )
    check_refused(offbeat, (*small, "--method", "ddg-dataflow:M=2"), "ddg-dataflow has no settings")


def test_rows_of_a_reproduction_are_run_with_other_settings_of_their_method(offbeat):
    listed = ("reproduce", "ablation", "--list", "--json")
    plain = {row["name"]: row["recipe"] for row in json.loads(offbeat(*listed).out)}
    adl = {row["name"]: row["recipe"] for row in json.loads(offbeat(*listed, "--method", "adl").out)}
    assert adl == {name: recipe for name, recipe in plain.items() if recipe["method"] == "adl"}
    assert len(adl) < len(plain)
    for name, recipe in (
        (row["name"], row["recipe"]) for row in json.loads(offbeat(*listed, "--method", "adl:M=2,weights=hybrid").out)
    ):
        assert recipe["settings"] == {**adl[name]["settings"], "M": 2, "weights": "hybrid"}
        followed = adl[name]["lr"] == 0.1 * 32 * adl[name]["settings"]["M"] / 256
        assert recipe["lr"] == (0.1 * 32 * 2 / 256 if followed else adl[name]["lr"])
        assert {**recipe, "settings": 0, "lr": 0} == {**adl[name], "settings": 0, "lr": 0}
    check_refused(offbeat, (*listed, "--method", "dgl"), "no selected row trains by dgl", "adl, bp")
    check_refused(offbeat, (*listed, "--method", "adl:beta=2"), "adl takes no beta")
