"""offbeat.partition, the profile, and pipelines of models that were never written for one."""

from __future__ import annotations

import copy
import hashlib
import subprocess
import sys
import time
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from fixed_times import few_laps
from preloaded import PYTHON
from selected import some
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import offbeat
from offbeat import models
from offbeat.errors import Unbalanced, UserError
from offbeat.partitioning import Memory, Profile, partition, profile, solve, trace

sys.path.insert(0, str(Path(__file__).parent))

import zoo

pytestmark = pytest.mark.usefixtures("forked_children", "few_laps_here")

NOT_SEQUENTIAL = [name for name in zoo.CASES if not name.startswith("resnet")]
TRAINED = ("torchvision-style resnet", "se-resnet", "gpt", "unet", "skipping mlp", "densenet", "stochastic")


@pytest.fixture(scope="module")
def few_laps_here():
    with few_laps():
        yield


def made(name: str) -> tuple[nn.Module, object]:
    torch.manual_seed(0)
    return zoo.CASES[name].make().double(), zoo.CASES[name].sample()


def on_meta(name: str, size: int, batch: int = 2) -> tuple[nn.Module, Tensor]:
    with torch.device("meta"):
        return models.build(name, shape=(3, size, size)), torch.empty(batch, 3, size, size)


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same(a: object, b: object) -> bool:
    """Equal to the last bit, NaN included."""
    one, other = pytree.tree_leaves(a), pytree.tree_leaves(b)
    return len(one) == len(other) and all(
        torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in zip(one, other)
    )


def refused(words: tuple[str, ...], *arguments: object, **options: object) -> str:
    with pytest.raises(UserError) as raised:
        partition(*arguments, **options)
    line = str(raised.value)
    assert "\n" not in line
    for word in words:
        assert word in line, line
    return line


class Tied(nn.Module):
    """Its first and last layer share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


# ---- the stages


@pytest.mark.parametrize("name", NOT_SEQUENTIAL)
def test_the_stages_one_after_the_other_are_the_model_bit_for_bit(name):
    model, x = made(name)
    whole = copy.deepcopy(model)
    K = min(4, len(trace(model).legal_cuts) + 1)
    before = state(model)
    found = partition(model, K, x)
    assert same(state(model), before), "cutting changed the model"
    for training in (False, True):
        whole.train(training)
        torch.manual_seed(1)
        expected = whole(*x) if isinstance(x, tuple) else whole(x)
        torch.manual_seed(1)
        value = x
        for stage in found.stages:
            value = stage.train(training)(value)
        assert same(value, expected), f"training: {training}"
        assert same(state(model), state(whole)), "buffers"


@pytest.mark.parametrize("name", some(NOT_SEQUENTIAL, of=2))
def test_a_partition_lists_its_cuts_and_the_names_of_its_units(name):
    model, x = made(name)
    found = partition(model, 3, x)
    assert found.K == len(found.stages) == 3
    assert found.units == "layers"
    assert len(found.cuts) == 2
    assert set(found.cuts) <= set(trace(model).legal_cuts)
    assert len(set(found.names)) == len(found.names) > 3
    parameters = [key for stage in found.stages for key, _ in stage.named_parameters()]
    assert sorted(parameters) == sorted(key for key, _ in model.named_parameters())


def test_what_cannot_be_traced_stays_one_unit_with_a_note_that_gives_the_reason():
    model, x = made("mixed")
    found = partition(model, 2, x)
    assert len(found.notes) == 1
    assert "branching (Branching) stays one unit" in found.notes[0]
    assert [name for name in found.names if "branching" in name] == ["branching"]


def test_a_model_that_traces_has_no_notes():
    assert partition(*_with(made("se-resnet"), 3)).notes == []


@pytest.mark.parametrize("name", ["se-resnet", "gpt", "unet"])
def test_two_calls_cut_at_the_same_places(name):
    model, x = made(name)
    first, second = partition(model, 4, x), partition(copy.deepcopy(model), 4, x)
    assert (first.cuts, first.names) == (second.cuts, second.names)


def test_cuts_that_were_given_are_made():
    model, x = made("vgg")
    found = partition(model, 3, cuts=[2, 7])
    assert found.cuts == [2, 7]
    value = x
    for stage in found.stages:
        value = stage.eval()(value)
    assert same(value, model.eval()(x))


@pytest.mark.filterwarnings("ignore::offbeat.errors.Unbalanced")  # of times on a busy machine
def test_measured_cuts_are_legal_and_leave_the_model_as_it_was():
    model, x = made("se-resnet")
    before = state(model)
    found = partition(model, 3, x, by="measured")
    assert len(found.cuts) == 2
    assert set(found.cuts) <= set(trace(model).legal_cuts)
    assert same(state(model), before)
    edges = [0, *found.cuts, len(found.names)]
    assert found.costs == pytest.approx([sum(found.unit_costs[a:b]) for a, b in pairwise(edges)])
    assert found.balance <= solve(found.unit_costs, 3, legal=found.legal).balance * (1 + 1e-9)


def _with(case: tuple[nn.Module, object], K: int) -> tuple[nn.Module, int, object]:
    return case[0], K, case[1]


# ---- cuts by name, the table, the warning


class Sleeping(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(4, 4), seconds

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > -1e9:  # reads values, and so is one unit
            time.sleep(self.seconds)
        return self.linear(x)


def test_a_slow_unit_is_named_where_cuts_are_measured():
    model = nn.Sequential(Sleeping(0.0), Sleeping(0.02), Sleeping(0.0), Sleeping(0.0))
    with pytest.warns(Unbalanced, match="unit 1 alone has 1.* times"):
        made = partition(model, 2, torch.ones(2, 4), by="measured", units="blocks")
    assert any("uneven cuts" in note for note in made.notes)


def test_the_table_has_the_same_shares_of_chosen_and_of_given_cuts():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.Conv2d(16, 16, 3))
    x = torch.ones(2, 3, 16, 16)
    chosen = partition(model, 2, x)
    assert partition(model, 2, x, cuts=chosen.cuts).summary() == chosen.summary()


def test_a_cut_can_be_given_by_the_name_of_a_module():
    model, x = made("torchvision-style resnet")
    found = partition(model, 3, x, cuts=["layer1.1", "layer2.0"])
    assert [found.names[cut] for cut in found.cuts] == ["layer1.1.conv1", "layer2.0.conv1"]
    assert {name.split(".")[0] for name, _ in found.stages[1].named_parameters()} == {"layer1"}
    value = x
    for stage in found.stages:
        value = stage.eval()(value)
    assert same(value, model.eval()(x))
    blocks = nn.Sequential(*[zoo.CountingBlock() for _ in range(4)])
    assert partition(blocks, 2, cuts=["2"]).units == "blocks"
    inside = partition(blocks, 2, cuts=["2.linear"])
    assert (inside.units, inside.names[inside.cuts[0]]) == ("layers", "2.linear")


def test_a_name_that_is_no_place_to_cut_is_refused_with_what_to_do():
    model, x = made("mixed")
    refused(("unknown module in cuts 'branchin'", "did you mean 'branching'"), model, 2, x, cuts=["branchin"])
    first = trace(model).units[0].name
    refused((f"cut before '{first}', the first unit", "name a later module"), model, 2, x, cuts=[first])
    inner = nn.Sequential(nn.Linear(6, 6), nn.Sequential(zoo.Branching(), nn.Linear(6, 6)), nn.Linear(6, 6))
    inner[1].register_forward_hook(lambda module, args, output: output)
    refused(("cut before '1.1', which is inside the unit 1", "use '1'"), inner, 2, cuts=["1.1"])


def test_a_printed_partition_is_a_table_of_its_stages():
    model, x = made("se-resnet")
    found = partition(model, 3, x)
    lines = str(found).splitlines()
    assert lines[0].split() == ["stage", "from", "to", "units", "parameters", "cost", "memory", "sends", "per", "batch"]
    assert len(lines) == 4
    rows = found.summary()
    assert [row.first for row in rows] == [found.names[start] for start in [0, *found.cuts]]
    assert sum(row.parameters for row in rows) == sum(p.numel() for p in model.parameters())
    assert sum(row.share for row in rows) == pytest.approx(1)
    assert [row.boundary is None for row in rows] == [False, False, True]
    assert rows[0].boundary == sum(t.numel() * t.element_size() for t in _sent(found.stages[0], x))
    assert all(row.memory > 8 * row.parameters for row in rows)
    assert found.balance == pytest.approx(1 / 3 / max(row.share for row in rows))


def _sent(stage: nn.Module, x: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(stage(x)) if isinstance(leaf, Tensor)]


def test_a_table_without_a_sample_has_names_and_parameters():
    found = partition(made("vgg")[0], 2, cuts=["classifier"])
    assert found.balance is None
    assert all(row.share is None and row.memory is None for row in found.summary())
    assert str(found).splitlines()[1].split() == ["1", "features.0", "view", "10", "1,192", "-", "-", "-"]


def test_a_stage_that_is_much_slower_is_worth_a_warning_with_its_unit():
    wide = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 512), nn.Linear(512, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.warns(
        Unbalanced, match=r"stage [12] of 4 has 1\.9\d times the mean cost: unit [12] alone has 1\.9\d times"
    ):
        found = partition(wide, 4, torch.randn(2, 8))
    assert "cut inside blocks" in found.notes[0]
    assert found.notes[0] in str(found)
    with pytest.warns(Unbalanced, match="split it into submodules"):
        partition(wide, 4, torch.randn(2, 8), units="layers")


def test_a_balanced_partition_warns_of_nothing(recwarn):
    partition(nn.Sequential(*[nn.Linear(8, 8) for _ in range(8)]), 4, torch.randn(2, 8))
    assert not [warning for warning in recwarn if issubclass(warning.category, Unbalanced)]


# ---- how a batch becomes arguments


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, scale: Tensor | None = None, *, shift: Tensor | None = None) -> Tensor:
        x = torch.tanh(self.a(x))
        x = x if scale is None else x * scale
        return self.b(x) if shift is None else self.b(x) + shift


class OneDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.b(torch.tanh(self.a(batch["x"]))) + batch["y"]


def through(stages: list[nn.Module], x: object) -> object:
    for stage in stages:
        x = stage(x)
    return x


@pytest.mark.parametrize("way", ["fx", "sample"])
def test_a_dict_fills_keyword_arguments_and_reaches_later_stages(way):
    model, x = Keywords(), torch.randn(3, 6)
    batch = {"shift": torch.randn(6), "x": x}
    found = partition(model, 2, batch, cuts=["b"], trace=way)
    assert same(through(found.stages, batch), model(**batch))
    assert same(through(partition(model, 1, batch).stages, batch), model(**batch))
    full = {"x": x, "scale": torch.randn(6), "shift": torch.randn(6)}
    assert same(through(partition(model, 2, full, cuts=["b"], trace=way).stages, full), model(**full))


@pytest.mark.parametrize("way", ["fx", "sample"])
def test_a_model_that_takes_one_dict_gets_it(way):
    model, batch = OneDict(), {"x": torch.randn(3, 6), "y": torch.randn(3, 6)}
    found = partition(model, 2, batch, cuts=["b"], trace=way)
    assert same(through(found.stages, batch), model(batch))


def test_a_batch_in_the_wrong_form_is_refused_with_the_next_step():
    model, x = Keywords(), torch.randn(3, 6)
    refused(("give a dict", '"x": ..., "scale": ...', "forward(x, scale=...)"), model, 2, (x, x))
    refused(("a dict with images for Keywords", "forward takes x, scale, shift"), model, 2, {"images": x, "x": x})
    refused(("a dict without x", "forward takes x, scale, shift"), model, 2, {"scale": x})
    refused(("a dict of images is passed as x", "forward(x, scale, shift)"), model, 2, {"images": x})


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is:DeprecationWarning")
def test_a_scripted_module_is_refused_with_the_next_step():
    model = torch.jit.script(Tied())
    refused(("the model is a scripted module", "give the Python module"), model, 2, torch.randn(3, 6))
    inside = nn.Sequential(nn.Linear(6, 6), torch.jit.script(nn.Linear(6, 6)))
    refused(("1 is a scripted module", "give the Python module"), inside, 2, torch.randn(3, 6))


# ---- pins, speeds, memory


def test_pinned_cuts_are_among_the_chosen():
    model, x = made("se-resnet")
    legal = trace(model).legal_cuts
    for pin in (legal[0], legal[len(legal) // 2], legal[-1]):
        assert pin in partition(model, 3, x, pinned=[pin]).cuts
    assert partition(model, 3, x, pinned=[legal[0], legal[-1]]).cuts == [legal[0], legal[-1]]


def test_a_slow_worker_gets_less():
    model, x = on_meta("resnet20", 32)
    flops = profile(model, x, timed=False).costs()

    def loads(**options: object) -> list[float]:
        cuts = partition(model, 3, x, units="layers", **options).cuts
        return [sum(flops[a:b]) for a, b in zip([0, *cuts], [*cuts, len(flops)])]

    equal, unequal = loads(), loads(speeds=[1, 1, 0.5])
    assert unequal[2] < equal[2]
    assert unequal[2] < 0.6 * min(unequal[:2])
    assert partition(model, 3, x, speeds=[1, 1, 0.5]).units == "layers"  # positions of what was traced


def test_a_memory_limit_moves_the_cuts_and_an_impossible_one_is_refused():
    model, x = made("vgg")
    costs = profile(model, x, timed=False)
    memory = Memory(
        parameters=[unit.parameter_bytes for unit in costs.units],
        held=[unit.held_bytes for unit in costs.units],
        versions=[5, 4],
        in_flight=[3, 1],
        limit=1.0,
    )
    line = refused(("2 stages do not fit a memory limit of 1 per worker", "at least"), model, 2, x, memory=memory)
    least = float(line.split("at least ")[1].split(",")[0])
    assert len(partition(model, 2, x, memory=replace(memory, limit=least)).cuts) == 1
    refused(("do not fit",), model, 2, x, memory=replace(memory, limit=least - 1))


# ---- bad input


def test_more_stages_than_units_are_refused():
    model, x = made("skipping mlp")
    most = len(trace(model).legal_cuts) + 1
    assert len(partition(model, most, x).stages) == most
    refused((f"{most + 1} stages", f"use K={most}"), model, most + 1, x)
    refused(("stages",), model, 0, x)


def test_a_model_whose_control_flow_depends_on_data_is_refused_with_the_reason():
    refused(("2 stages", "Branching", "stays one unit"), zoo.Branching(), 2, torch.randn(4, 6))
    model, x = made("mixed")
    most = len(trace(model).legal_cuts) + 1
    refused((f"use K={most}", "branching (Branching) stays one unit"), model, most + 1, x)


def test_a_model_that_cannot_be_traced_at_all_is_refused_with_the_reason():
    class Opaque(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(int(x.sum().item()) % 2 + 1):
                x = self.a(x)
            return self.b(x)

    refused(("2 stages", "Opaque", "stays one unit"), Opaque(), 2, torch.randn(4, 6))


WRONG = {
    "too few dimensions": torch.randn(3, 16),
    "wrong channels": torch.randn(3, 4, 16, 16, dtype=torch.float64),
    "too small": torch.randn(3, 3, 1, 1, dtype=torch.float64),
    "wrong type": torch.randint(9, (3, 3, 16, 16)),
    "no tensor": "images",
    "a tuple": (torch.randn(3, 3, 16, 16, dtype=torch.float64),) * 2,
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_sample_that_the_model_cannot_take_is_refused(kind):
    model, _ = made("vgg")
    refused((), model, 2, WRONG[kind])


class Named:
    def __init__(self, value):
        self.value = value


class Branching(nn.Module):
    """Cannot be traced, and returns an object of a class of its own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return Named(self.layer(x) if x.sum() > 0 else x)


class Unwrapping(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.after, self.last = Branching(), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        inner = self.inner(x)
        middle = self.after(inner.value)
        return self.last(middle + inner.value)


def test_no_cut_is_made_where_an_object_that_cannot_be_sent_crosses():
    made = offbeat.partition(Unwrapping(), 2, torch.ones(2, 4), trace="fx")
    assert made.names[made.cuts[0]] == "add"
    with pytest.raises(UserError, match="sends a value that no message can contain"):
        offbeat.partition(Unwrapping(), 2, torch.ones(2, 4), trace="fx", cuts=["after"])


def test_a_sample_on_another_device_than_the_model_is_moved_to_it():
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8)).to("meta")
    devices = []
    model[0].register_forward_pre_hook(lambda module, inputs: devices.append(inputs[0].device.type))
    offbeat.partition(model, 2, units="layers", sample=torch.zeros(2, 3, dtype=torch.long))
    assert set(devices) == {"meta"}


def test_no_sample_and_no_cuts_are_refused():
    refused(("sample", "cuts"), made("vgg")[0], 2)


def test_shared_parameters_have_one_owner_and_copies_are_the_models_own():
    model, x = Tied(), torch.randn(4, 6)
    for found in (partition(model, 2, x), partition(model, 2, cuts=[2])):
        assert [tie.names for tie in found.ties] == [{1: "first.weight", 2: "last.weight"}]
        assert same(found.stages[1](found.stages[0](x)), model(x))
        assert "last.weight" not in dict(found.stages[1].named_parameters())
    found = partition(model, 2, x, tied="copies")
    assert model.last.weight is dict(found.stages[1].named_parameters())["last.weight"]
    assert same(found.stages[1](found.stages[0](x)), model(x))
    one, other = (dict(stage.named_parameters()) for stage in found.stages)
    assert one["first.weight"] is not other["last.weight"]
    assert same(one["first.weight"].detach(), other["last.weight"].detach())


@pytest.mark.filterwarnings("ignore::offbeat.errors.Unbalanced")  # of times on a busy machine
def test_shared_parameters_can_be_untied_under_measured_cuts():
    found = partition(Tied(), 2, torch.randn(4, 6), by="measured", tied="copies")
    assert found.K == 2


def test_a_tied_gpt_is_cut_into_three_stages_whose_table_crosses_both_cuts():
    model, x = zoo.GPT(tied=True), torch.randint(11, (3, 7))
    found = partition(model, 3, x)
    (tie,) = found.ties
    assert tie.names == {1: "tokens.weight", 3: "head.weight"}
    assert [tie.sent(k) for k in (1, 2, 3)] == [True, True, False]


BAD = {
    "unknown units": ({"units": "blcoks"}, ("blcoks", "did you mean 'blocks'")),
    "unknown costs": ({"by": "flop"}, ("flop", "did you mean 'flops'")),
    "too few speeds": ({"speeds": [1.0]}, ("1 speeds for 2 stages",)),
    "a speed of nothing": ({"speeds": [1.0, 0.0]}, ("speeds", "above 0")),
    "a pin outside": ({"pinned": [10_000]}, ("10000", "cuts are from 1")),
    "too many pins": ({"pinned": [1, 2]}, ("2 pinned cuts", "use K=3 or more")),
    "cuts that fall": ({"cuts": [0]}, ("[0]", "from 1 to")),
    "too many cuts": ({"cuts": [1, 2]}, ("cuts=[1, 2] gives 3 stages, not K=2: give 1 cut",)),
    "too few cuts": ({"cuts": []}, ("cuts=[] gives 1 stage, not K=2: give 1 cut",)),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_option_is_refused_in_one_line(name):
    options, words = BAD[name]
    model, x = made("vgg")
    refused(words, model, 2, x, **options)


# ---- balance


def fits(costs: list[float], K: int, limit: float) -> bool:
    """Whether K stages of at most this cost hold all units in order: each filled as far as it goes."""
    stages, load = 1, 0.0
    for cost in costs:
        stages, load = (stages, load + cost) if load + cost <= limit else (stages + 1, cost)
    return stages <= K and max(costs) <= limit


@cache
def counted(name: str, size: int) -> Profile:
    """What its units cost on any machine: the same for every K."""
    return profile(*on_meta(name, size), timed=False)


def check_balance(name: str, size: int, K: int, least: float, *, or_best: bool = False) -> None:
    """At least so balanced; or_best: or, where units are too coarse for that, provably as balanced as they can be."""
    found = counted(name, size)
    costs = found.costs()
    solution = solve(costs, K, legal=found.legal_cuts)
    print(f"{name} K={K}: balance {solution.balance:.4f}, the largest unit permits {solution.balance_bound:.4f}")
    assert sum(costs) == pytest.approx(sum(solution.times))
    assert len(found.legal_cuts) == len(costs) - 1
    assert fits(costs, K, solution.bottleneck)
    assert not fits(costs, K, solution.bottleneck - 1)  # FLOPs are whole numbers
    assert or_best or solution.balance >= least


@pytest.mark.parametrize(("name", "K"), [("resnet56", 4), ("resnet56", 8), ("resnet110", 4), ("resnet110", 8)])
def test_cifar_networks_balance_to_95_percent(name, K):
    check_balance(name, 32, K, 0.95)


@pytest.mark.slow
@pytest.mark.parametrize("K", [4, 8])
def test_resnet1202_balances_to_95_percent(K):
    check_balance("resnet1202", 32, K, 0.95)


@pytest.mark.parametrize("K", [4, 8])
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("resnet18", 64),
        ("resnet18", 224),
        ("resnet50", 64),
        ("resnet101", 224),
        pytest.param("resnet50", 224, marks=pytest.mark.slow),
        pytest.param("resnet101", 64, marks=pytest.mark.slow),
    ],
)
def test_imagenet_networks_balance_to_90_percent_their_units_permitting(name, size, K):
    check_balance(name, size, K, 0.90, or_best=name == "resnet18")  # 17 convolutions and a stem in 8 stages


# ---- profile


def test_a_profile_is_read_back_as_it_was_written(tmp_path):
    for timed in (False, True):
        found = profile(*made("se-resnet"), timed=timed)
        found.save(tmp_path / "profile.json")
        assert Profile.load(tmp_path / "profile.json") == found


@pytest.mark.parametrize("content", [None, "", "{}", "[1]", '{"units": [{"nmae": 1}]}'])
def test_a_profile_that_cannot_be_read_is_refused_in_one_line(tmp_path, content):
    path = tmp_path / "profile.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=r"profile.*cannot be read.*measure it again"):
        Profile.load(path)


def test_layers_of_equal_blocks_share_their_times(monkeypatch):
    monkeypatch.setattr(sys.modules[profile.__module__], "DIFFERENT", float("inf"))
    tokens = models.random_batch(2, (8,), 256)
    units = profile(models.build("gpt:layers=3,width=16,heads=2,context=8"), tokens, repeat=1).units
    up, qkv = ([unit.forward for unit in units if unit.name.endswith(end)] for end in ("mlp.up", "attention.qkv"))
    assert up == up[:1] * 3
    assert qkv == qkv[:1] * 3
    assert up != qkv


def test_layers_of_other_modules_keep_their_own_times(monkeypatch):
    """In an nn.Sequential names are numbers, and sizes and FLOPs of all activation functions are the same."""
    times = iter([1.0, 2.0, 1.0, 2.0])
    monkeypatch.setattr(sys.modules[profile.__module__], "_seconds", lambda *given: (next(times), 0.0))
    layers = nn.Sequential(nn.Sigmoid(), nn.GELU(), nn.Sigmoid(), nn.GELU())
    assert profile(layers, torch.ones(2, 4)).costs() == [1.0, 2.0, 1.0, 2.0]


def test_a_timed_profile_has_times_and_what_is_held():
    model, x = made("se-resnet")
    found = profile(model, x)
    assert found.timed
    assert found.device == "cpu"
    assert found.shapes == [list(x.shape)]
    assert all(unit.forward > 0 for unit in found.units)
    convolutions = [unit for unit in found.units if unit.flops]
    assert convolutions
    assert all(unit.backward > 0 for unit in convolutions)
    assert any(unit.held_bytes > 0 for unit in found.units)
    assert len(found.boundary_bytes) == len(found.units)
    assert all(size > 0 for size in found.boundary_bytes)
    assert found.costs() == [unit.forward + unit.backward for unit in found.units]


@pytest.mark.parametrize("name", ["skipping mlp", "se-resnet", "vgg"])
def test_what_units_hold_together_is_what_the_graph_of_the_model_saves(name):
    """No memory twice, and no views of parameters."""
    model, x = made(name)
    found, saved = profile(model, x, timed=False), {}

    def note(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = model(x)  # keeps what is saved
    for tensor in (x, *model.parameters(), *model.buffers()):
        saved.pop(tensor.untyped_storage().data_ptr(), None)
    assert output.requires_grad
    assert sum(unit.held_bytes for unit in found.units) == sum(saved.values())


@pytest.mark.parametrize("name", some(NOT_SEQUENTIAL))
def test_sizes_are_the_same_on_the_meta_device(name):
    model, x = made(name)
    if name == "mixed":
        pytest.skip("a branch on data has no value on the meta device; the next test")
    real, meta = profile(model, x, repeat=1), profile(model, x, timed=False)
    for field in ("name", "parameters", "parameter_bytes", "flops", "moved_bytes"):
        assert [getattr(u, field) for u in real.units] == [getattr(u, field) for u in meta.units], field
    assert real.boundary_bytes == meta.boundary_bytes
    assert real.legal_cuts == meta.legal_cuts
    assert sum(unit.parameters for unit in real.units) == sum(p.numel() for p in model.parameters())


def test_a_model_with_a_branch_on_data_inside_can_be_cut_by_flops():
    assert partition(*_with(made("mixed"), 2)).K == 2


# ---- pipelines


def loss_of(name: str):
    return {"unet": F.mse_loss, "skipping mlp": F.mse_loss, "stochastic": F.mse_loss}.get(
        name, lambda out, y: F.cross_entropy(out.flatten(0, -2), y.flatten())
    )


def target(name: str, output: Tensor) -> Tensor:
    if loss_of(name) is F.mse_loss:
        return torch.zeros_like(output)
    return torch.randint(output.shape[-1], output.shape[:-1])


def sgd(lr: float):
    return lambda parameters: torch.optim.SGD(parameters, lr=lr)


@pytest.mark.parametrize("name", TRAINED)
def test_a_model_that_is_no_sequence_trains_in_three_stages(name):
    model, x = made(name)
    twin, loss = copy.deepcopy(model), loss_of(name)
    output = twin(x)
    y = target(name, output.detach())
    loss(output, y).backward()
    used = {key for key, p in twin.named_parameters() if p.grad.abs().max() > 1e-9}  # not: a bias under a BatchNorm
    assert len(used) > 5
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    pipe = offbeat.Pipeline(model, K=3, method="adl", M=2, loss=loss, optimizer=sgd(0.01), sample=x)
    assert pipe.units == "layers"
    for _ in range(8):
        pipe.step(x, y)
    pipe.drain()
    assert {key for key, p in model.named_parameters() if not torch.equal(p.detach(), before[key])} >= used
    assert [stage.mean for stage in pipe.staleness] == [2.0, 1.0, 0.0]
    found = pipe.evaluate([(x, y)])
    with torch.no_grad():
        assert found["loss"] == float(loss(model.eval()(x), y))


def test_a_batch_cuts_a_pipeline_as_the_same_sample_does():
    model, x = made("se-resnet")
    options = {"K": 3, "method": "adl", "M": 2, "loss": F.cross_entropy, "optimizer": sgd(0.01)}
    early = offbeat.Pipeline(copy.deepcopy(model), sample=x, **options)
    late = offbeat.Pipeline(copy.deepcopy(model), **options)
    y = torch.randint(5, (3,))
    late.step(x, y)
    assert early.cuts == late.cuts
    early.step(x, y)
    assert same(state(early.drain()), state(late.drain()))


@pytest.mark.filterwarnings("ignore::offbeat.errors.Unbalanced")  # of times on a busy machine
def test_a_pipeline_takes_cuts_by_name_and_cuts_by_measured_time():
    model, x = made("se-resnet")
    options = {"K": 3, "method": "adl", "M": 2, "loss": F.cross_entropy, "optimizer": sgd(0.01)}
    named = offbeat.Pipeline(model, cuts=["layer1.1", "layer2.0"], **options)
    assert named.cuts == partition(model, 3, cuts=["layer1.1", "layer2.0"]).cuts
    measured = offbeat.Pipeline(copy.deepcopy(model), by="measured", sample=x, **options)
    assert set(measured.cuts) <= set(trace(model).legal_cuts)
    blocks = nn.Sequential(*[zoo.CountingBlock() for _ in range(4)])
    entries = offbeat.Pipeline(blocks, cuts=["2"], **{**options, "K": 2})
    assert (entries.cuts, entries.units) == ([2], "blocks")


def test_a_pipeline_refuses_a_wrong_number_of_cuts_between_layers():
    for cuts in ([4], [2, 4, 6]):
        with pytest.raises(UserError, match="K=3"):
            offbeat.Pipeline(made("se-resnet")[0], K=3, loss=F.cross_entropy, optimizer=sgd(0.1), cuts=cuts)


def train_deep(name: str, K: int, M: int = 2) -> None:
    """Enough batches that the first module's first update is done: its gradient of batch 0 comes after 2(K-1)."""
    torch.manual_seed(0)
    model = models.build(name, shape=(3, 8, 8))
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    x, y = torch.randn(2, 3, 8, 8), torch.randint(10, (2,))
    pipe = offbeat.Pipeline(
        model, K=K, method="adl", M=M, loss=F.cross_entropy, optimizer=sgd(0.001), units="layers", sample=x
    )
    for _ in range(2 * (K - 1) + M):
        assert torch.isfinite(pipe.step(x, y))
    pipe.gather()
    assert len(pipe.cuts) == K - 1
    assert [key for key, p in model.named_parameters() if torch.equal(p.detach(), before[key])] == []
    assert pipe.staleness[-1].mean == 0


@pytest.mark.parametrize("name", ["resnet20", pytest.param("resnet18-cifar", marks=pytest.mark.slow)])
def test_a_network_trains_in_twenty_stages(name):
    train_deep(name, 20)


@pytest.mark.slow
def test_resnet56_trains_in_fifty_six_stages():
    train_deep("resnet56", 56)


SCRIPT = """
import hashlib, sys
sys.path[:0] = [{here!r}]
import torch, zoo, offbeat
from torch.nn import functional as F

def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, K = zoo.ResNet(squeeze=True).double(), {K}
    x = torch.randn(2 * K + 4, 3, 3, 8, 8, dtype=torch.float64)
    y = torch.randint(5, (2 * K + 4, 3))
    pipe = offbeat.Pipeline(model, K=K, method="adl", M=2, loss=F.cross_entropy, sample=x[0],
                            optimizer=lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9))
    pipe.fit(list(zip(x, y)))
    found = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        found.update(name.encode() + tensor.contiguous().numpy().tobytes())
    sys.stdout.write(f"cuts {{pipe.cuts}} hash {{found.hexdigest()}}\\n")  # at once: all processes share the pipe
    sys.stdout.flush()
    pipe.close()

main()
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_twenty_processes_give_the_weights_of_the_simulator(tmp_path):
    K = 20
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(here=str(Path(__file__).parent), K=K))
    alone = subprocess.run([PYTHON, str(script)], capture_output=True, text=True, timeout=150, check=False)
    assert alone.returncode == 0, alone.stderr[-2000:]
    torchrun = [PYTHON, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={K}", str(script)]
    together = subprocess.run(torchrun, capture_output=True, text=True, timeout=240, check=False)
    assert together.returncode == 0, together.stderr[-3000:]
    expected = alone.stdout.strip()
    assert expected.startswith("cuts [")
    assert len(expected.split("hash ")[1]) == len(hashlib.sha256().hexdigest())
    assert [line for line in together.stdout.splitlines() if line.startswith("cuts")] == [expected] * K
