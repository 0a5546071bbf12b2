"""The command line, in this process: bad input in one line, defaults, lists, and nothing written for nothing run."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from itertools import pairwise

import pytest
from command import check_refused, contents

from offbeat import models
from offbeat.cli import brief
from offbeat.errors import NotFused, NotRecorded
from offbeat.runs.build import open_data
from offbeat.runs.recipe import make_recipe

SMALL = ("--data", "synthetic", "--samples", "32", "--model", "mlp", "--epochs", "1")  # 5 units
RECIPE = {"model": "mlp", "data": "synthetic", "samples": 32}


# ---- bad input

OPTIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # beside SMALL; what the line must say
    "model": (("--model", "resnet65"), ("resnet65", "did you mean 'resnet56'")),
    "method": (("--method", "ald"), ("ald", "did you mean 'adl'")),
    "data": (("--data", "cifar1O"), ("cifar1O", "did you mean 'cifar10'")),
    "engine": (("--engine", "simulator"), ("simulator", "did you mean 'simulate'")),
    "weights": (("--weights", "stahs"), ("stahs", "did you mean 'stash'")),
    "clip over": (("--clip-norm", "1", "--clip-over", "modle"), ("modle", "did you mean 'model'")),
    "clip over without a norm": (("--clip-over", "model"), ("--clip-over model needs --clip-norm",)),
    "clip over local losses": (
        ("--method", "dgl", "--clip-norm", "1", "--clip-over", "model"),
        ("--clip-over model with dgl", "use --clip-over stage"),
    ),
    "window": (("--window", "align"), ("align", "did you mean 'aligned'")),
    "weights far from any": (("--weights", "foo"), ("foo", "stash, hybrid, replay")),
    "window far from any": (("--window", "foo"), ("foo", "count, aligned")),
    "K=0": (("-K", "0"), ("-K 0", "at least 1")),
    "K=-1": (("-K", "-1"), ("-K -1",)),
    "K=1.5": (("-K", "1.5"), ("-K", "integer")),
    "K above the units": (("-K", "11"), ("11 stages", "10 units", "use -K 10 or fewer")),
    "K far above the units": (("-K", str(10**20)), ("10 units",)),
    "K of 400 digits": (("-K", str(10**399)), ("1000...0000 (400 digits) stages", "10 units")),
    "lr of 400 digits": (("--lr", str(10**400)), ("--lr inf: use a finite number",)),
    "seed of 4000 digits": (("--seed", "1" * 4000), ("--seed 1111...1111 (4000 digits): use an integer of at most",)),
    "M=0": (("-M", "0"), ("-M 0", "at least 1")),
    "M=-3": (("-M", "-3"), ("-M -3",)),
    "batch size 0": (("--batch-size", "0"), ("--batch-size 0",)),
    "batch size beyond any memory": (("--batch-size", str(10**30)), ("batch-size",)),
    "epochs 0": (("--epochs", "0"), ("--epochs 0",)),
    "epochs in words": (("--epochs", "many"), ("--epochs", "integer")),
    "negative lr": (("--lr", "-0.1"), ("--lr -0.1",)),
    "nan lr": (("--lr", "nan"), ("--lr nan: use a finite number",)),
    "infinite lr": (("--lr", "inf"), ("--lr inf: use a finite number",)),
    "lr in words": (("--lr", "small"), ("--lr", "number")),
    "negative momentum": (("--momentum", "-1"), ("--momentum -1",)),
    "negative weight decay": (("--weight-decay", "-1"), ("--weight-decay -1",)),
    "nan warm-up": (("--warmup", "nan"), ("--warmup nan: use a finite number",)),
    "negative clipping": (("--clip-norm", "-1"), ("--clip-norm -1",)),
    "milestones that fall": (("--milestones", "0.75,0.5"), ("milestones", "increasing")),
    "nan milestone": (("--milestones", "nan"), ("milestones",)),
    "milestones in words": (("--milestones", "half"), ("--milestones", "half")),
    "negative seed": (("--seed", "-1"), ("--seed -1",)),
    "no threads": (("--threads-per-stage", "0"), ("--threads-per-stage 0",)),
    "too few cuts": (("-K", "3", "--cuts", "2"), ("--cuts 2 gives 2 stages, not -K 3: give 2 cuts",)),
    "too many cuts": (("-K", "2", "--cuts", "1,2"), ("--cuts 1,2 gives 3 stages, not -K 2: give 1 cut",)),
    "no cuts": (("-K", "2", "--cuts", ""), ("--cuts '' gives 1 stage, not -K 2: give 1 cut",)),
    "cuts without stages": (("--cuts", "2"), ("--cuts 2 gives 2 stages, not -K 1: leave the cuts out",)),
    "on nan": (("--on-nan", "skp"), ("unknown --on-nan skp: did you mean 'skip'?",)),
    "checkpoint mode": (("--checkpoint-mode", "drain"), ("unknown --checkpoint-mode drain: did you mean 'drained'?",)),
    "cuts that fall": (("-K", "3", "--cuts", "3,2"), ("[3, 2]", "increase")),
    "a cut twice": (("-K", "3", "--cuts", "2,2"), ("[2, 2]", "increase")),
    "cut before everything": (("-K", "2", "--cuts", "0"), ("[0]", "from 1 to 4")),
    "cut after everything": (("-K", "2", "--cuts", "5"), ("[5]", "from 1 to 4")),
    "negative cut": (("-K", "2", "--cuts", "-1"), ("[-1]", "from 1 to 4")),
    "cuts in words": (("-K", "2", "--cuts", "middle"), ("--cuts", "middle")),
    "fractional cuts": (("-K", "2", "--cuts", "1.5"), ("--cuts", "1.5")),
    "shape in words": (("--shape", "junk"), ("--shape", "junk")),
    "shape of two": (("--shape", "8,8"), ("--shape 8,8", "channels, height")),
    "shape of four": (("--shape", "1,8,8,8"), ("shape", "channels, height")),
    "shape with a zero": (("--shape", "1,0,8"), ("shape",)),
    "negative shape": (("--shape", "1,-8,8"), ("shape",)),
    "shape that data cannot have": (("--data", "digits", "--shape", "3,8,8"), ("shape", "digits")),
    "shape too small for the model": (("--model", "resnet18", "--shape", "3,8,8"), ("shape", "resnet18")),
    "no classes": (("--classes", "0"), ("0 classes",)),
    "no samples": (("--samples", "0"), ("0 samples",)),
    "folder where none is taken": (("--data-dir", "."), ("synthetic takes no folder",)),
    "missing folder": (("--data", "cifar10", "--data-dir", "nowhere"), ("nowhere", "does not exist")),
    "folder name beyond any": (("--data", "cifar10", "--data-dir", "x" * 300), ("xxx",)),
    "cifar10 without a folder": (("--data", "cifar10"), ("cifar10 needs --data-dir", "cifar-10-batches-bin")),
    "image folder without images": (("--data", "imagefolder", "--data-dir", "."), ("train",)),
    "missing config": (("--config", "nowhere.json"), ("nowhere.json", "does not exist")),
    "config that is a folder": (("--config", "."), ("--config .",)),
    "out name beyond any": (("--out", "x" * 300), ("xxx",)),
    "unknown option": (("--epoch", "3"), ("--epoch", "train --help")),
    "option without its value": (("--epochs",), ("--epochs",)),
    "an argument too many": (("resnet56",), ("resnet56",)),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_bad_option_is_refused_in_one_line_and_nothing_is_written(offbeat, name):
    arguments, words = OPTIONS[name]
    base = SMALL if "--data" not in arguments else ("--model", "mlp", "--epochs", "1")  # other data takes no samples
    check_refused(offbeat, ("train", *base, *arguments), *words)


EMPTY_PATHS: dict[str, tuple[str, ...]] = {
    "train": ("train", *SMALL, "--out", ""),
    "train with =": ("train", *SMALL, "--out="),
    "train, resumed": ("train", "--resume", ""),
    "train, config": ("train", *SMALL, "--config", ""),
    "train, data": ("train", *SMALL, "--data-dir", ""),
    "train, tokenizer": ("train", *SMALL, "--tokenizer="),
    "compare": ("compare", *SMALL, "--methods", "bp,adl", "--out", ""),
    "reproduce": ("reproduce", "cifar10-table", "--out", ""),
    "reproduce, data": ("reproduce", "cifar10-table", "--data", ""),
    "bench": ("bench", "--model", "mlp", "--out", ""),
    "bench scaling": ("bench", "scaling", "--model", "mlp", "--out", ""),
    "plan, profile": ("plan", "--model", "mlp", "--profile", ""),
    "plan, picture": ("plan", "--model", "mlp", "--picture", ""),
    "demo": ("demo", "--out", ""),
    "report": ("report", ".", "--out", ""),
    "report of": ("report", ""),
    "checkpoint": ("checkpoint", "verify", ""),
    "export": ("export", ""),
}


@pytest.mark.parametrize("name", EMPTY_PATHS)
def test_an_empty_path_is_not_the_current_folder(offbeat, name):
    check_refused(offbeat, EMPTY_PATHS[name], "'': give the name of a file or folder")


def test_the_demo_writes_into_no_folder_of_another_run(offbeat, tmp_path):
    assert offbeat("train", *SMALL, "--engine", "simulate", "--out", "run").code == 0
    check_refused(offbeat, ("demo", "--out", "run"), "run already contains a run: give another folder as --out")


def test_a_profile_that_cannot_be_written_is_refused(offbeat, tmp_path):
    arguments = ("plan", "--model", "mlp", "--shape", "1,4,4", "-K", "2", "--profile", "/proc/profile.json")
    check_refused(offbeat, arguments, "profile /proc/profile.json cannot be written", "give another file")


def test_a_timeline_of_too_many_stages_is_refused(offbeat):
    check_refused(offbeat, ("methods", "adl", "-K", "1001"), "-K 1001: use a whole number from 1 to 1000")


@pytest.mark.parametrize("config", ['{"methods": "bp,adl"}', "{", "[]"])
def test_a_folder_of_another_command_or_a_broken_one_is_not_resumed(offbeat, tmp_path, config):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(config)
    check_refused(offbeat, ("train", "--resume", "other"), "--resume other is not the folder of a run that can be")


@pytest.mark.parametrize("worker", [False, True])
def test_ctrl_c_before_the_imports_ends_in_at_most_one_line(monkeypatch, capsys, worker):
    """It ended in a traceback, of each worker too."""
    from offbeat import __main__
    from offbeat.runs import launch

    class Stop:
        def find_spec(self, name, *_):
            if name == "offbeat.cli":
                raise KeyboardInterrupt

    monkeypatch.delenv(launch.ERRORS, raising=False)
    if worker:
        monkeypatch.setenv(launch.ERRORS, "errors")
    monkeypatch.delitem(sys.modules, "offbeat.cli")
    monkeypatch.setattr(sys, "meta_path", [Stop(), *sys.meta_path])
    with pytest.raises(SystemExit) as exit:
        __main__.main()
    assert exit.value.code == 130
    assert capsys.readouterr().err == ("" if worker else "offbeat: stopped by Ctrl-C\n")


def test_the_current_folder_is_named_by_a_dot(offbeat, monkeypatch):
    assert offbeat("train", *SMALL, "--milestones", "", "--out", ".", "--dry-run").code == 0


def test_all_that_is_allowed_is_listed_beside_the_nearest_match(offbeat):
    line = check_refused(offbeat, ("train", *SMALL, "--model", "resnet65"))
    assert all(name in line for name in models.names())


@pytest.mark.parametrize("arguments", [("trian",), ("--nonsense",), ("models", "resnet20"), ("demo", "--epochs", "0")])
def test_a_bad_command_is_refused_in_one_line(offbeat, arguments):
    check_refused(offbeat, arguments)


def test_a_missing_command_is_refused_in_one_line_that_names_the_help(offbeat, tmp_path):
    outcome = offbeat()  # the help itself may be on stdout
    assert outcome.code == 2
    assert outcome.err.count("\n") == 1
    assert outcome.err.startswith("offbeat: ")
    assert "command" in outcome.err.partition(";")[0].lower()
    assert "--help" in outcome.err
    assert contents(tmp_path) == {}


def test_a_truncated_cifar_file_is_refused_with_both_sizes(offbeat, tmp_path):
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for name in ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"):
        (folder / f"{name}.bin").write_bytes(b"\0" * 1000)
    arguments = ("train", "--data", "cifar10", "--data-dir", tmp_path)
    check_refused(offbeat, arguments, "data_batch_1.bin", "1000 bytes", "30730000")
    archive = tmp_path / "cifar-10-binary.tar.gz"
    archive.write_bytes(b"\x1f\x8b nothing of the kind")
    check_refused(offbeat, ("train", "--data", "cifar10", "--data-dir", archive), archive.name, "truncated")


CONFIGS: dict[str, tuple[str, tuple[str, ...]]] = {
    "not JSON": ("{", ("x.json", "cannot be read")),
    "empty": ("", ("x.json", "cannot be read")),
    "a list": ("[1, 2]", ("x.json", "config.json of a run")),
    "a number": ("3", ("x.json", "config.json of a run")),
    "without a recipe": ('{"provenance": {}}', ("x.json", "config.json of a run")),
    "a recipe that is text": ('{"recipe": "adl"}', ("x.json", "config.json of a run")),
    "a recipe that is null": ('{"recipe": null}', ("x.json", "config.json of a run")),
    "an unknown key": ('{"recipe": {"epoch": 3}}', ("x.json", "'epoch'", "did you mean 'epochs'")),
    "K as text": ('{"recipe": {"K": "2"}}', ("x.json", '"K": "2"', "int")),
    "K as a truth": ('{"recipe": {"K": true}}', ("x.json", '"K": true', "int")),
    "epochs as a fraction": ('{"recipe": {"epochs": 1.5}}', ("x.json", '"epochs": 1.5', "int")),
    "lr as null": ('{"recipe": {"lr": null}}', ("x.json", '"lr": null', "float")),
    "lr not a number": ('{"recipe": {"lr": NaN}}', ("--lr nan: use a finite number",)),
    "cuts as text": ('{"recipe": {"cuts": "1,2"}}', ("x.json", '"cuts": "1,2"', "tuple")),
    "cuts of text": ('{"recipe": {"cuts": ["1"]}}', ("x.json", '"cuts": ["1"]', "tuple")),
    "milestones as a number": ('{"recipe": {"milestones": 3}}', ("x.json", '"milestones": 3', "tuple")),
    "milestones that are none": ('{"recipe": {"milestones": [NaN]}}', ("milestones",)),
    "a model as a number": ('{"recipe": {"model": 56}}', ("x.json", '"model": 56', "str")),
    "an object for a number": ('{"recipe": {"seed": {}}}', ("x.json", '"seed": {}', "int")),
    "an unknown method": ('{"recipe": {"method": "ald"}}', ("did you mean 'adl'",)),
    "unknown weights": ('{"recipe": {"weights": "stahs"}}', ("did you mean 'stash'",)),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_bad_config_is_refused_in_one_line(offbeat, tmp_path, name):
    text, words = CONFIGS[name]
    (tmp_path / "x.json").write_text(text)
    check_refused(offbeat, ("train", "--config", "x.json", "--out", "y"), *words)


def test_a_config_of_bytes_that_are_no_text_is_refused(offbeat, tmp_path):
    (tmp_path / "x.json").write_bytes(b"\xff\xfe\x00")
    check_refused(offbeat, ("train", "--config", "x.json"), "x.json", "cannot be read")


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_an_out_that_cannot_become_a_new_run_folder_is_refused(offbeat, tmp_path, dry):
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    train = ("train", *SMALL, *dry, "--out")
    check_refused(offbeat, (*train, "file"), "file", "is not a writable folder")
    check_refused(offbeat, (*train, "run"), "run", "already contains a run")
    check_refused(offbeat, (*train, "file/run"), "file/run", "--out")
    check_refused(offbeat, (*train, "file/deep/run"), "file/deep/run", "--out")


def test_options_change_a_config_and_null_in_it_means_the_default(offbeat, tmp_path):
    config = {"recipe": {**RECIPE, "K": 3, "cuts": None, "clip_norm": None, "epochs": 7}}
    (tmp_path / "x.json").write_text(json.dumps(config))
    recipe = json.loads(offbeat("train", "--config", "x.json", "--epochs", 2, "--dry-run", "--json").out)["recipe"]
    assert (recipe["K"], recipe["epochs"], recipe["engine"], recipe["clip_norm"]) == (3, 2, "processes", None)


# ---- what runs nothing


@pytest.mark.parametrize("how", [("-K", 1), ("-K", 2), ("-K", 3, "--engine", "simulate"), ("-K", 2, "--cuts", 4)])
def test_a_dry_run_prints_what_would_run_and_writes_nothing(offbeat, monkeypatch, tmp_path, how):
    monkeypatch.setattr("offbeat.runs.begin.train_here", lambda *_, **__: pytest.fail("trained"))
    spoken = offbeat("train", *SMALL, *how, "--dry-run")
    assert spoken.code == 0
    assert spoken.err == ""
    assert spoken.out.count("\n") == 1
    assert "nothing was trained" in spoken.out
    assert f"K={how[1]}" in spoken.out

    printed = offbeat("train", *SMALL, *how, "--batch-size", 3, "--out", "runs/x", "--dry-run", "--json")
    assert printed.code == 0
    assert printed.err == ""
    checked = json.loads(printed.out)
    assert checked["recipe"]["K"] == how[1]
    assert len(checked["recipe"]["cuts"]) == how[1] - 1
    assert checked["batches_an_epoch"] == 11  # 32 samples: the short last batch is used
    assert "--cuts" not in how or checked["recipe"]["cuts"] == [4]
    assert checked["out"] == "runs/x"
    assert contents(tmp_path) == {}


@pytest.mark.slow
def test_models_are_listed_with_parameters_flops_and_largest_k(offbeat, monkeypatch):
    listed = offbeat("models", "--json")
    assert (listed.code, listed.err) == (0, "")
    entries = {entry["name"]: entry for entry in json.loads(listed.out)}
    assert list(entries) == models.names()
    assert {
        "resnet20",
        "resnet32",
        "resnet44",
        "resnet56",
        "resnet98",
        "resnet110",
        "resnet164",
        "resnet1202",
        "resnet18-cifar",
        "resnet18",
        "resnet34",
        "resnet50",
        "resnet101",
        "resnet152",
        "seresnet18",
        "seresnet50",
        "mlp",
    } <= set(entries)
    known = {"resnet56": (853_018, 29), "resnet18": (11_689_512, 10), "resnet50": (25_557_032, 18)}  # torchvision's
    for name, (parameters, units) in known.items():
        assert (entries[name]["parameters"], entries[name]["units"]) == (parameters, units)
        assert entries[name]["flops"] > 2 * 9 * parameters

    described = {name: models.ModelDescription(**entry) for name, entry in entries.items()}
    monkeypatch.setattr(models, "describe", described.__getitem__)  # counted above, which takes seconds
    monkeypatch.setenv("COLUMNS", "120")
    table = offbeat("models")
    assert (table.code, table.err) == (0, "")
    rows = {line.split()[0]: line.split() for line in table.out.splitlines() if line.strip()}
    for name, entry in described.items():
        assert rows[name][-3:] == [f"{entry.parameters:,}", f"{entry.flops:,}", f"{entry.units:,}"]
    assert "largest K" in table.out


@pytest.mark.parametrize("command", [(), ("train",), ("models",), ("demo",)])
def test_help_is_printed(offbeat, command, tmp_path):
    printed = offbeat(*command, "--help")
    assert (printed.code, printed.err) == (0, "")
    assert "Usage" in printed.out
    assert contents(tmp_path) == {}


def test_the_help_of_train_names_every_option(offbeat, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    printed = offbeat("train", "--help").out
    for option in (
        "--model",
        "--data",
        "--data-dir",
        "--method",
        "-K",
        "-M",
        "--epochs",
        "--out",
        "--engine",
        "--weights",
        "--batch-size",
        "--lr",
        "--seed",
        "--threads-per-stage",
        "--cuts",
        "--json",
        "--dry-run",
        "--config",
    ):
        assert option in printed


def test_the_version_is_printed(offbeat):
    import offbeat as package

    assert offbeat("--version").out.strip() == package.__version__


# ---- the paper's recipe


def test_the_defaults_are_the_papers_recipe(offbeat):
    recipe = json.loads(offbeat("train", "--data", "synthetic", "-K", 4, "--dry-run", "--json").out)["recipe"]
    expected = {
        "model": "resnet56",
        "method": "adl",
        "momentum": 0.9,
        "settings": {"M": 4, "weights": "stash", "window": "count"},
        "batch_size": 32,
        "lr": 0.1 * 32 * 4 / 256,
        "warmup": 3.0,
        "epochs": 300,
        "weight_decay": 5e-4,
        "milestones": [1 / 2, 3 / 4, 11 / 12],
        "seed": 0,
        "engine": "processes",
    }
    assert {name: recipe[name] for name in expected} == expected
    assert asdict(make_recipe(data="cifar10")) | {"data": ""} == asdict(make_recipe(data="cifar100")) | {"data": ""}


def test_the_defaults_for_image_folders_are_the_papers_for_imagenet():
    recipe = make_recipe(data="imagefolder", model="resnet18", batch_size=64, M=2, K=3)
    assert recipe.lr == 0.1 * 64 * 2 / 256
    assert (recipe.epochs, recipe.weight_decay, recipe.milestones) == (90, 1e-4, (1 / 3, 2 / 3, 8 / 9))
    assert (recipe.momentum, recipe.warmup) == (0.9, 3.0)


@pytest.mark.parametrize(("given", "cores", "decoding"), [(None, 3, 3), (None, 64, 8), (0, 64, 0), (20, 3, 20)])
def test_images_are_decoded_on_all_cores_up_to_eight_by_default(monkeypatch, tmp_path, given, cores, decoding):
    for folder in ("train/a", "train/b", "val/a", "val/b"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "x.png").touch()
    monkeypatch.setattr("offbeat.runs.build.cores", lambda: cores)
    recipe = make_recipe(data="imagefolder", data_dir=str(tmp_path), model="resnet18", data_workers=given)
    assert open_data(recipe).workers == decoding


@pytest.mark.parametrize(("method", "M", "lr"), [("bp", None, 0.0125), ("bp", 4, 0.05), ("adl", 1, 0.0125)])
def test_the_learning_rate_follows_the_samples_of_an_update(method, M, lr):
    assert make_recipe(method=method, M=M).lr == pytest.approx(lr, rel=1e-12)


def test_one_process_is_the_default_for_one_stage_and_processes_for_more():
    assert [make_recipe(K=K).engine for K in (1, 2, 10)] == ["simulate", "processes", "processes"]


@pytest.mark.parametrize("data", ["cifar10", "imagefolder"])
def test_an_update_takes_the_rate_of_its_first_batch_for_all_m(data):
    batches = 10
    recipes = {M: make_recipe(data=data, M=M, epochs=36, batch_size=1) for M in (1, 3, 4)}
    factors = {M: recipe.learning_rate(recipe.count(batches)) for M, recipe in recipes.items()}
    for M in (3, 4):
        updates = range(36 * batches // M)
        assert [factors[M](s) for s in updates] == [factors[1](M * s) for s in updates]


def test_the_rate_ramps_up_over_three_epochs_and_falls_to_a_tenth_per_milestone():
    batches, recipe = 10, make_recipe(M=1, epochs=36, batch_size=1)
    factor = recipe.learning_rate(recipe.count(batches))
    ramp = [factor(t) for t in range(3 * batches + 1)]
    assert ramp[0] == pytest.approx(0.01)
    assert ramp[-1] == 1.0
    steps = {round(after - before, 12) for before, after in pairwise(ramp)}
    assert len(steps) == 1, "linear"
    for epoch, before, after in ((18, 1.0, 0.1), (27, 0.1, 0.01), (33, 0.01, 0.001)):
        assert factor(epoch * batches - 1) == pytest.approx(before)
        assert factor(epoch * batches) == pytest.approx(after)
    assert factor(36 * batches - 1) == pytest.approx(0.001)


def test_a_reason_of_several_stages_is_reported_once_in_one_line(capsys):
    others = []
    tell = brief(lambda *reported, **more: others.append(reported))
    for k in (1, 2, 3):
        tell(f"stage {k} is not recorded and runs eagerly: it draws\nrandom numbers", NotRecorded, "x.py", 1)
        tell(NotFused(f"stage {k} is not fused and runs as it is: no BatchNorm"), NotFused, "x.py", 1)
    tell(NotRecorded("stage 3 is not recorded and runs eagerly: too large"), NotRecorded, "x.py", 1)
    tell("of torch", UserWarning, "x.py", 1)
    assert capsys.readouterr().err.splitlines() == [
        "offbeat: stage 1 is not recorded and runs eagerly: it draws random numbers (shown for the first such stage)",
        "offbeat: stage 1 is not fused and runs as it is: no BatchNorm (shown for the first such stage)",
        "offbeat: stage 3 is not recorded and runs eagerly: too large (shown for the first such stage)",
    ]
    assert [message for message, *_ in others] == ["of torch"]
