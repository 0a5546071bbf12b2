"""Batches and epochs are counted in samples, so that a run can go on with another batch size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import UserError
from offbeat.runs.epochs import Epochs
from offbeat.runs.recipe import make_recipe

SIZES = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12)), min_size=1, max_size=4)


@given(samples=st.integers(9, 40), sizes=SIZES, drop_last=st.booleans())
def test_every_sample_appears_once_per_epoch_for_all_batch_sizes(samples, sizes, drop_last):
    """A literal loop over samples, with the batch size changed on the way."""
    epochs, t, epoch, offset = None, 0, 0, 0
    for batch_size, steps in sizes:
        new = Epochs(samples=samples, batch_size=batch_size, drop_last=drop_last)
        epochs = new if epochs is None else epochs.continued(t, new)
        if samples - offset < (batch_size if drop_last else 1):
            epoch, offset = epoch + 1, 0
        for _ in range(steps):
            assert epochs.position(t) == (epoch, offset)
            assert epochs.epoch_of(t) == epoch
            t, offset = t + 1, min(samples, offset + batch_size)
            ends = samples - offset < (batch_size if drop_last else 1)
            assert epochs.ends_epoch(t) == ends
            if ends:
                epoch, offset = epoch + 1, 0
                assert epochs.progress(t) == epoch * epochs.per_epoch


@given(samples=st.integers(1, 50), size=st.integers(1, 9), n=st.integers(0, 500))
def test_a_run_from_the_beginning_counts_batches(samples, size, n):
    epochs = Epochs(samples=samples, batch_size=size)
    assert epochs.progress(n) == n
    assert epochs.position(n)[0] == n // epochs.per_epoch


def test_the_schedule_follows_epochs_when_the_batch_size_changes():
    before = make_recipe(batch_size=4, epochs=10, M=1, warmup=0.0, milestones=(0.5,))
    after = make_recipe(batch_size=10, epochs=10, M=1, warmup=0.0, milestones=(0.5,))
    epochs = before.count(40).continued(20, after.count(40))  # two epochs of ten batches, then epochs of four
    factor = after.learning_rate(epochs)
    assert [factor(s) for s in (20, 31, 32, 33)] == [1.0, 1.0, 0.1, 0.1], "epoch 5 begins with batch 20 + 3 * 4"


def test_progress_counts_the_part_of_an_epoch_that_is_done():
    before, after = Epochs(samples=40, batch_size=4), Epochs(samples=40, batch_size=10)
    epochs = before.continued(15, after)  # in the middle of the second epoch, of which 20 samples are left
    assert [epochs.progress(n) / epochs.per_epoch for n in range(15, 19)] == [1.5, 1.75, 2.0, 2.25]


def test_an_epoch_without_a_full_batch_is_refused():
    with pytest.raises(UserError, match="batch_size=8 with drop_last=True, but an epoch has 7 samples"):
        Epochs(samples=7, batch_size=8, drop_last=True)
