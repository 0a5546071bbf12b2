"""The states of callbacks in checkpoints.

A callback that has `state_dict()` and `load_state_dict(state)` is saved by `Pipeline.save`, and restored by
`fit(..., resume=True)` after `load`, before its first method is called. Every process writes the states of its own
callbacks, by class and order:

    {"callbacks": {"EMA": ..., "CSVLogger": ..., "EMA 2": ...}, "losses": [[12, 0.5]], "newest": (12, 0.5)}

`losses` are those that callbacks of this process have not been given yet.

A process that loads a checkpoint reads those of all processes, merged: dicts key by key and, of other values, its own
or else that of the first process that has one. So averages of weights, which each process has of its own stages, are
complete in a pipeline with another K or in one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat import checkpoint
from offbeat.checkpoint import CheckpointFailed
from offbeat.errors import NotRestored, UserError, first_line, warn_caller

if TYPE_CHECKING:
    from offbeat.pipeline.local_stages import LocalStages
    from offbeat.pipeline.training_loop import TrainingLoop

NOTHING: dict[str, Any] = {"callbacks": {}, "losses": [], "newest": None}


class CallbackStates:
    """What a pipeline knows of callbacks, in one process.

    loop    the newest call of fit, if some process had callbacks in it
    found   states of the checkpoint that was loaded, until the next call of fit
    """

    def __init__(self) -> None:
        self.loop: TrainingLoop | None = None
        self.found: dict[str, Any] | None = None

    def begin(self, loop: TrainingLoop | None, *, resume: bool) -> None:
        if loop is not None and resume:
            loop.found = self.found
        self.loop, self.found = loop, None

    def settle(self) -> None:
        """Before a checkpoint, in all processes after the same batch: bring all losses to every process."""
        if self.loop is not None and not self.loop.ended:
            self.loop.settle_losses()

    def part(self, local: LocalStages) -> dict[str, Any]:
        """What this process writes, by the name of the part."""
        if self.loop is None:
            tree = self.found if local.engine.leads and self.found and self.found["callbacks"] else None
        elif named(self.loop.callbacks):
            tree = {
                "callbacks": states(self.loop.callbacks),
                "losses": [list(each) for each in self.loop.rest.items()],
                "newest": self.loop.newest,
            }
        else:
            tree = None
        return {} if tree is None else {own_name(local): tree}

    def load(self, local: LocalStages, path: Path) -> None:
        """Read the states of all processes as one."""
        made = checkpoint.read(path)
        own = own_name(local) if made.K == local.K else None
        names = sorted(made.callbacks, key=lambda name: name != own)
        self.loop, self.found = None, merged([*(made.part(name) for name in names), NOTHING])


def own_name(local: LocalStages) -> str:
    engine = local.engine
    return checkpoint.part_name(engine.here[0], engine.replicas_here[0], kind=checkpoint.CALLBACKS)


def named(callbacks: Iterable[Any]) -> dict[str, Any]:
    """The callbacks that have a state, by class and order.

    >>> from offbeat.callbacks import EMA, ProgressBar
    >>> list(named([EMA(), ProgressBar(), EMA()]))
    ['EMA', 'EMA 2']
    """
    found: dict[str, Any] = {}
    for callback in callbacks:
        if all(callable(getattr(callback, method, None)) for method in ("state_dict", "load_state_dict")):
            kind, number = type(callback).__name__, 1
            while (name := kind if number == 1 else f"{kind} {number}") in found:
                number += 1
            found[name] = callback
    return found


def states(callbacks: Iterable[Any]) -> dict[str, Any]:
    """The state of each callback; CheckpointFailed where one has none that can be stored."""
    found = {}
    for name, callback in named(callbacks).items():
        try:
            found[name] = callback.state_dict()
        except Exception as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise CheckpointFailed(f"state_dict() of callback {name} raised {reason}") from error
        try:
            checkpoint.flatten(found[name])
        except UserError as error:
            raise CheckpointFailed(f"the state of callback {name} cannot be saved: {error}") from error
    return found


def restore(callbacks: Iterable[Any], saved: Mapping[str, Any]) -> None:
    """Load the states of callbacks that are given; one without a saved state is reported."""
    for name, callback in named(callbacks).items():
        if name not in saved:
            note = f"the checkpoint has no state of callback {name}, which starts anew"
            warn_caller(note, NotRestored)
            continue
        try:
            callback.load_state_dict(saved[name])
        except Exception as error:
            raise UserError(
                f"callback {name} cannot load its state ({type(error).__name__}: {first_line(error)}): give the "
                "callbacks of the saved training, or leave it out"
            ) from error


def merged(trees: Sequence[Any]) -> Any:
    """Dicts merged key by key; of other values the first.

    >>> merged([{"decay": 0.9, "weights": {"a": 1}}, {"decay": 0.9, "weights": {"b": 2}}])
    {'decay': 0.9, 'weights': {'a': 1, 'b': 2}}
    """
    if not all(isinstance(tree, dict) for tree in trees):
        return trees[0]
    keys = dict.fromkeys(key for tree in trees for key in tree)
    return {key: merged([tree[key] for tree in trees if key in tree]) for key in keys}
