"""Pipeline(method="auto", batch=B): the same training as with what it chose, one update per call."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from fixed_times import fix_times
from torch import nn

import offbeat
from offbeat.pipeline import choice

K, B = 3, 16


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def deep() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), *(nn.Linear(6, 6) for _ in range(4)), nn.Linear(6, 3))


def batches(n: int = 6, size: int = B) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(size, 4, generator=g), torch.randint(3, (size,), generator=g)) for _ in range(n)]


def pipeline(**options) -> offbeat.Pipeline:
    given = {"K": K, "loss": nn.functional.cross_entropy, "optimizer": lambda p: torch.optim.AdamW(p, lr=0.01)}
    return offbeat.Pipeline(options.pop("model", None) or network(), **{**given, **options})


@pytest.fixture
def times(monkeypatch):
    return fix_times(monkeypatch, choice)


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def test_auto_is_the_training_of_what_it_chose_with_one_update_per_call(times):
    auto = pipeline(method="auto", batch=B)
    by_hand = pipeline(method=offbeat.ADL1F1B(M=4, corrector="auto"))
    for x, y in batches():
        loss = auto.step(x, y)
        losses = [by_hand.step(*part) for part in zip(x.split(4), y.split(4), strict=True)]
        assert loss.equal(torch.stack(losses).mean())
    assert times == [16, 8, 4, 2]
    assert (auto.method, auto.batches) == (by_hand.method, 4 * 6)
    assert [stage.update_index for stage in auto.stages.values()] == [5, 5, 6]  # the first two are late
    assert same(auto.drain(), by_hand.drain())
    first, stage = repr(auto).splitlines()[:2]
    assert first.startswith("Pipeline(method=adl-1f1b (auto), K=3, M=4, batch=16, engine=simulate, balance=0.")
    assert stage.startswith("  stage 1: 30 parameters, ")
    assert stage.endswith(" % of the work, staleness 0.5, corrector lookahead:least=1+sc")
    assert [row.M for row in auto.recommendation.measured] == [1, 2, 4, 8]


def test_fit_takes_batches_of_an_update_too_and_a_short_last_one(times):
    auto, by_hand = pipeline(method="auto", batch=B), pipeline(method=offbeat.ADL1F1B(M=4, corrector="auto"), batch=B)
    data = [*batches(3), *batches(1, size=6)]
    auto.fit(data, epochs=2)
    for x, y in data * 2:
        by_hand.step(x, y)
    assert same(auto.drain(), by_hand.drain())


def test_one_stage_is_back_propagation_with_the_whole_batch(times):
    auto, plain = pipeline(method="auto", K=1, batch=B), pipeline(method="bp", K=1)
    for x, y in batches():
        assert auto.step(x, y).equal(plain.step(x, y))
    assert same(auto.drain(), plain.drain())
    assert times == []


def test_a_sample_decides_before_the_first_batch(times):
    auto = pipeline(method="auto", batch=B, sample=torch.zeros(1, 4))
    assert (auto.method.M, len(auto.stages)) == (4, K)
    pipe = pipeline(method="auto", batch=B, cuts=[1, 3])
    assert repr(pipe) == "Pipeline(method=auto (measured on the first batch), K=3, batch=16, engine=simulate)"


def test_without_a_batch_every_batch_is_an_update_and_a_warning_says_so():
    with pytest.warns(
        offbeat.LateGradients, match='method="auto" without batch=: M=1, every batch is an update, and gradients'
    ):
        auto = pipeline(method="auto")
    by_hand = pipeline(method=offbeat.ADL1F1B(M=1, corrector="auto"), staleness_warmup=300)
    assert auto.method == by_hand.method
    for x, y in batches():
        assert auto.step(x, y).equal(by_hand.step(x, y))
    assert repr(auto).startswith("Pipeline(method=adl-1f1b (auto), K=3, M=1, staleness_warmup=300, engine=simulate")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pipeline(method="auto", M=2).method.M == 2
        assert pipeline(method="auto", K=1).method == offbeat.BP()


class Stream(torch.utils.data.IterableDataset):
    """Its loader does not know its length."""

    def __iter__(self):
        return iter([(x[0], y[0]) for x, y in batches(3, size=1)])


def synchronous_starts(train) -> list[str]:
    """The warnings of synchronous starts, during a call."""
    with warnings.catch_warnings(record=True, action="always") as found:
        train()
    return [str(one.message) for one in found if one.category is offbeat.ScheduleLength]


@pytest.mark.parametrize("options", [{}, {"batch": 2}])
def test_fit_warns_once_if_all_of_its_updates_are_synchronous(options):
    """They were, without a word."""
    auto = pipeline(method="auto", M=1, **options)
    assert synchronous_starts(lambda: auto.fit(batches(15, size=2), epochs=2)) == [
        'method="auto": 30 of 30 updates are synchronous (staleness_warmup=300): give staleness_warmup=3, or 0'
    ]
    assert synchronous_starts(lambda: auto.fit(batches(15, size=2))) == []
    short = pipeline(method="auto", M=1, **options)
    assert synchronous_starts(lambda: short.fit(batches(8, size=2))) == [
        'method="auto": 8 of 8 updates are synchronous (staleness_warmup=300): give staleness_warmup=0'
    ]


@pytest.mark.parametrize(
    ("updates", "said"), [(300, "300 of 300 updates"), (599, "300 of 599 updates"), (600, None), (4000, None)]
)
def test_a_start_of_more_than_half_of_the_updates_is_named_after_the_first_batch(updates, said):
    steps = pipeline(method="auto", M=1).steps(batches(1, size=2) * updates)
    found = synchronous_starts(lambda: next(steps))
    assert (len(found), (said or "") in "".join(found)) == (bool(said), True), found


def test_a_loop_of_steps_is_warned_at_its_drain_if_all_updates_were_synchronous():
    """They were, without a word: the length of such a loop is not known before."""

    def train(auto: offbeat.Pipeline, updates: int) -> None:
        for x, y in batches(updates, size=2):
            auto.step(x, y)
        auto.drain()

    found = pipeline(method="auto", M=1)
    assert synchronous_starts(lambda: train(found, 30)) == [
        'method="auto": 30 of 30 updates so far are synchronous (staleness_warmup=300): if training ends here, give '
        "staleness_warmup=3, or 0"
    ]
    assert synchronous_starts(lambda: train(found, 2)) == []  # once
    assert len(synchronous_starts(lambda: train(pipeline(method="auto", M=1), 300))) == 1
    assert synchronous_starts(lambda: train(pipeline(method="auto", M=1), 301)) == []
    assert synchronous_starts(lambda: train(pipeline(method="auto", M=1, staleness_warmup=300), 4)) == []
    assert synchronous_starts(lambda: train(pipeline(), 4)) == []

    fitted = pipeline(method="auto", M=1)
    assert len(synchronous_starts(lambda: (fitted.fit(batches(4, size=2), drain=False), fitted.drain()))) == 1


def test_fit_counts_the_updates_of_replicas_and_of_micro_batches():
    for options, said in (
        ({"replicas": 2}, "15 of 15 updates"),
        ({"K": 6, "M": 2}, "15 of 15 updates"),
        ({"K": 6, "M": 2, "batch": 2}, "30 of 30 updates"),
    ):
        auto = pipeline(**{"method": "auto", "M": 1, "model": deep(), **options})
        with pytest.warns(offbeat.ScheduleLength, match=said):
            auto.fit(batches(30, size=2))


def test_fit_does_not_warn_of_a_given_start_that_ends_or_without_a_known_length():
    data = batches(4, size=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", offbeat.ScheduleLength)
        pipeline(method="auto", M=1, staleness_warmup=3).fit(data)
        pipeline(method=offbeat.ADL(M=1), staleness_warmup=3).fit(data)
        pipeline(method="auto", K=2, M=2, batch=2).fit(data)  # half an update late
        pipeline(method="auto", M=1).fit(lambda epoch: data)
        pipeline(method="auto", M=1).fit(torch.utils.data.DataLoader(Stream(), batch_size=2))


def test_latency_beyond_the_time_of_a_stage_chooses_the_lag_of_adl(times):
    assert pipeline(method="auto", batch=B, latency=1.3, sample=torch.zeros(1, 4)).method.name == "adl-1f1b"
    assert pipeline(method="auto", batch=B, latency=1.4, sample=torch.zeros(1, 4)).method.name == "adl"
    with pytest.warns(offbeat.LateGradients, match="without batch="):
        pipe = pipeline(method="auto:latency=9", sample=torch.zeros(5, 4))
    assert (pipe.method.name, pipe.method.M) == ("adl", 1)


def test_a_staleness_warmup_has_the_chosen_m(times):
    auto = pipeline(method="auto", batch=B, staleness_warmup=2)
    by_hand = pipeline(method=offbeat.ADL1F1B(M=4, corrector="auto"), batch=B, staleness_warmup=2)
    for x, y in batches():
        assert auto.step(x, y).equal(by_hand.step(x, y))
    assert same(auto.drain(), by_hand.drain())


def test_auto_resumes_from_a_state_bit_for_bit(times):
    def made() -> offbeat.Pipeline:
        return pipeline(method="auto", batch=B, sample=torch.zeros(1, 4))

    whole, first, second = made(), made(), made()
    for x, y in batches():
        whole.step(x, y)
    first.keep()
    for x, y in batches()[:3]:
        first.step(x, y)
    second.load_stage_states(first.stage_states(), first.batches)
    for x, y in batches()[3:]:
        second.step(x, y)
    assert same(whole.drain(), second.drain())


def test_measuring_changes_neither_the_model_nor_random_numbers():
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))
    before, state = copy.deepcopy(model), torch.get_rng_state()
    pipe = pipeline(model=model, K=2, method="auto", batch=64, sample=torch.randn(3, 4, generator=torch.Generator()))
    assert same(model, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert [row.size for row in pipe.recommendation.measured] == [64, 32, 16]  # no smaller, for BatchNorm
    assert all(row.seconds > 0 for row in pipe.recommendation.measured)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"method": "auto", "batch": 0}, "batch=0: use a whole number from 1 up"),
        ({"method": "auto", "batch": 10, "M": 4}, "batch=10 with M=4: use a batch that is a multiple of M"),
        ({"method": offbeat.ADL(M=4), "batch": 10}, "batch=10 with M=4: use a batch that is a multiple of M"),
        ({"method": "adl", "latency": 0.1}, 'latency=0.1 without method="auto"'),
        ({"method": "auto", "latency": -0.1, "batch": B}, "latency=-0.1: use a number of seconds from 0 up"),
        ({"method": "auto", "latency": "long", "batch": B}, "latency='long': use a number or None"),
        ({"method": "auto:m=3", "batch": B}, "auto takes no m .*: leave it out; its settings are M, .*, latency$"),
        ({"method": "auto:m=3", "K": 1}, "auto takes no m "),
        ({"method": "auto:WEIGHTS=stash", "batch": B}, "auto takes no WEIGHTS .*: leave it out; its settings are M, "),
        ({"method": "auto:M=0", "batch": B}, "M=0 gradients per update: use an integer of at least 1"),
        ({"method": "auto", "M": 0, "batch": B}, "M=0 gradients per update: use an integer of at least 1"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(options, said):
    with pytest.raises(offbeat.UserError, match=said) as error:
        pipeline(**options)
    assert "\n" not in str(error.value)


def test_batches_of_a_wrong_size_are_refused_in_one_line(times):
    pipe = pipeline(method="auto", batch=B)
    (x, y), (short, few) = batches(1, size=B + 1)[0], batches(1, size=3)[0]
    with pytest.raises(offbeat.UserError, match="17 samples with batch=16: give at most 16 samples per call"):
        pipe.step(x, y)
    with pytest.raises(offbeat.UserError, match="3 samples cannot be split into M=4 micro-batches"):
        pipe.step(short, few)
    with pytest.raises(offbeat.UserError, match='method="auto" measures on a batch'):
        pipeline(method="auto", batch=B).evaluate([])
