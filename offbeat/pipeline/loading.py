"""Batches on their path from a loader into the first stage, and the marks that follow them through all stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

from offbeat.core.links import Link, Message
from offbeat.core.metrics import batch_size
from offbeat.core.micro_batches import micro_batches
from offbeat.core.worker import Worker
from offbeat.errors import UserError
from offbeat.pipeline.batches import pair
from offbeat.pipeline.checks import check_loader

EPOCH_END = "epoch"  # the kind of a mark after the last batch of an epoch; its number counts all batches so far
_Item = TypeVar("_Item")
Batches = Iterable[tuple[Any, Any] | Mapping[str, Any]]  # (x, y), or dicts of keyword arguments
Loader = Batches | Callable[[int], Batches]  # one for all epochs, or a function of the epoch that returns one


def enter(t: int, x: Any, y: Any, *, entrance: Link, m: int) -> None:
    """Send batch t to the first stage, which is in this process, as m micro-batches."""
    if x is None:
        raise UserError(f"step() without a batch in the first stage's process: pass x and y, or a dict, for batch {t}")
    for message in micro_batches(t, x, y, m):
        entrance.send(message)


def split(x: Any, y: Any, *, M: int, batch: int, t: int) -> list[tuple[Any, Any]]:
    """A batch of at most `batch` samples as M micro-batches, of which the first is batch t."""
    samples = batch_size(y, x)
    if samples > batch:
        raise UserError(f"{samples} samples with batch={batch}: give at most {batch} samples per call, one update")
    if samples < M:
        raise UserError(
            f"{samples} samples cannot be split into M={M} micro-batches of an update (batch={batch}): leave out short "
            "batches, as drop_last=True of a DataLoader does"
        )
    return [message.content[:2] for message in micro_batches(t, x, y, M)]


def read_epoch(loader: Loader | None, epoch: int, begin: int) -> Iterator[tuple[Any, Any]]:
    """The batches of an epoch, in the process of the first stage; `begin` is the number of the next batch."""
    if loader is None:
        raise UserError("no loader in the first stage's process: give an iterable of (x, y), or of dicts")
    given = loader(epoch) if callable(loader) else loader
    check_loader(given)
    t = begin
    for batch in given:
        yield pair(batch, t)
        t += 1
    if t == begin:
        raise UserError(
            f"the loader gave no batch in epoch {epoch}: give a list, a DataLoader, or a function "
            "of the epoch; a generator is empty after one"
        )


def shares(batches: Iterator[tuple[Any, Any]], replicas: int, here: Sequence[int]) -> Iterator[list[tuple[Any, Any]]]:
    """The batches of the replicas of this process: batch r of every R, without an incomplete last group.

    >>> [list(group) for group in shares(iter([(0, 0), (1, 1), (2, 2), (3, 3), (4, 4)]), 2, [1])]
    [[(1, 1)], [(3, 3)]]
    """
    groups = 0
    while len(group := list(islice(batches, replicas))) == replicas:
        groups += 1
        yield [group[replica] for replica in here]
    if not groups:
        raise UserError(
            f"a loader of {len(group)} batch{'es' * (len(group) > 1)} with replicas={replicas}: give at least one for "
            "each replica"
        )


def after(trained: int, epoch: int, batches: Iterator[list[tuple[Any, Any]]]) -> Iterator[list[tuple[Any, Any]]]:
    """The batches of an epoch after those that have been trained, which are read again and left out.

    >>> list(after(2, 0, iter([[("a", 0)], [("b", 0)], [("c", 0)]])))
    [[('c', 0)]]
    """
    again = sum(1 for _ in islice(batches, trained))
    if again < trained:
        raise UserError(
            f"{trained} batches of epoch {epoch} have been trained, but its loader now has {again}: resume with the "
            "same loader"
        )
    yield from batches


def until(stop: Callable[[], bool] | None, batches: Iterator[_Item]) -> Iterator[_Item]:
    """The batches up to where `stop`, which is called before each is read, returns True."""
    while stop is None or not stop():
        try:
            batch = next(batches)
        except StopIteration:
            return
        yield batch


def follow_epoch(worker: Callable[[], Worker], begin: int) -> Iterator[list[tuple[None, None]]]:
    """As many empty batches in another process, up to the mark that ends the epoch; `worker` returns the present one.

    Not every stage gets a message in every iteration (see methods/dgl_async.py): the mark states how many there are.
    """
    t = begin
    while (ahead := worker().ahead()).kind != EPOCH_END or t < ahead.t:
        yield [(None, None)]
        t += 1


def pass_on(mark: Message, workers: list[Worker]) -> None:
    """Send a mark through the stages of this process, after the batches."""
    for worker in workers:
        if worker.stage.k > 1:
            worker.ahead()
            received = worker.links.inputs.receive()
            assert received == mark, f"expected {mark}, got {received}"
        if worker.links.outputs:
            worker.links.outputs.send(mark)
