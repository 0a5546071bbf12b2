"""Prefetching: order, bound, errors, and no thread left behind."""

from __future__ import annotations

import gc
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest
from preloaded import PYTHON

from offbeat.data.prefetch import prefetch


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "offbeat-prefetch"]


def test_items_come_in_order_and_the_thread_ends_with_the_last() -> None:
    assert list(prefetch(iter(range(100)), ahead=2)) == list(range(100))
    assert threads() == []


def test_an_empty_source_gives_nothing() -> None:
    assert list(prefetch(iter(()))) == []


def test_never_more_than_the_bound_is_made_ahead() -> None:
    made = 0

    def source() -> Iterator[int]:
        nonlocal made
        for number in range(100):
            made += 1
            yield number

    items = prefetch(source(), ahead=3)
    for taken in range(1, 6):
        next(items)
        deadline = time.monotonic() + 10
        while made < taken + 3 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.02)
        assert made == taken + 3
    items.close()


def test_no_thread_is_started_before_the_first_item_is_taken() -> None:
    items = prefetch(iter(range(3)))
    assert threads() == []
    del items


def test_closing_ends_the_thread_and_closes_the_source() -> None:
    closed = []

    def source() -> Iterator[int]:
        try:
            while True:
                yield 0
        finally:
            closed.append(True)

    items = prefetch(source())
    next(items)
    assert len(threads()) == 1
    items.close()
    assert threads() == []
    assert closed == [True]


def test_dropping_the_iterator_ends_the_thread() -> None:
    items = prefetch(iter(range(1000)))
    next(items)
    del items
    gc.collect()
    assert threads() == []


def test_an_iterator_in_a_reference_cycle_is_collected_too() -> None:
    cycle: list[object] = [prefetch(iter(range(1000)))]
    next(cycle[0])  # type: ignore[call-overload]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert threads() == []


def test_leaving_a_loop_early_many_times_leaks_no_thread() -> None:
    before = threading.active_count()
    for _ in range(200):
        for item in prefetch(iter(range(50))):
            if item == 3:
                break
    gc.collect()
    assert threading.active_count() == before


def test_an_error_arrives_after_the_items_before_it() -> None:
    def source() -> Iterator[int]:
        yield 1
        yield 2
        raise KeyError("broken")

    items = prefetch(source(), ahead=5)
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(KeyError, match="broken"):
        next(items)
    assert threads() == []


def test_the_interpreter_exits_with_an_iterator_still_open() -> None:
    code = (
        "import itertools\nfrom offbeat.data.prefetch import prefetch\n"
        "items = prefetch(itertools.count())\nprint(next(items), next(items))\n"
    )
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 1\n", "")
