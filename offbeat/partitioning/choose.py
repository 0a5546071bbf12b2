"""Which trace of a model to cut: torch.fx, or a run on the sample, at the borders of blocks or inside them.

The choice compares balances by FLOPs and bytes, so it is the same everywhere.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from offbeat.errors import UserError
from offbeat.partitioning.profile import Profile, profile
from offbeat.partitioning.solve import solve
from offbeat.partitioning.ties import Tied
from offbeat.partitioning.trace import Traced, trace
from offbeat.partitioning.walk import verify

Trace = Literal["auto", "fx", "sample"]
BETTER = 1.05  # times the balance of another trace: the gain that is worth more cuts inside blocks, or another way
BALANCED = 0.9  # enough not to look for cuts inside blocks


def choose_trace(model: nn.Module, K: int, sample: Any, way: Trace, *, tied: Tied) -> tuple[Traced, Profile | None]:
    """The model's trace, verified on the sample where there is one, and its profile where it was needed to choose.

    The sample may be on another device than the model: batches in host memory train a model on a GPU.
    """
    own = next((parameter.device for parameter in model.parameters()), None)
    if own is not None:
        sample = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(own), sample)
    if way == "sample":
        return _on_sample(model, K, sample, tied)[:2]
    followed = trace(model, sample, way="fx")
    problem: UserError | None = None
    try:
        if sample is not None:
            verify(followed, sample)
    except UserError as error:
        problem = error
        if way == "fx":
            raise
    enough = problem is None and len(followed.legal(tied)) + 1 >= K
    if way == "fx" or sample is None or (enough and not followed.notes):
        return followed, None
    run, found, balance = _on_sample(model, K, sample, tied)
    if run.whole or (problem is None and len(run.legal(tied)) < min(K - 1, len(followed.legal(tied)))):
        if problem is not None:
            raise problem
        followed.notes += [f"run on the sample, {note}" for note in run.notes if run.whole]
        return followed, None
    if enough:
        counted = profile(model, sample, timed=False, traced=followed)
        if _balance(followed, counted, K, tied) * BETTER >= balance:
            return followed, counted
    return run, found


def _on_sample(model: nn.Module, K: int, sample: Any, tied: Tied) -> tuple[Traced, Profile | None, float]:
    """The trace on the sample: at the borders of blocks, or inside them if that balances better."""
    best: tuple[Traced, Profile | None, float] | None = None
    for inside in (False, True):
        traced = trace(model, sample, way="sample", inside_blocks=inside)
        if traced.whole:
            return best or (traced, None, 0.0)
        try:
            verify(traced, sample)
        except UserError:
            if best is None:
                raise
            break
        found = profile(model, sample, timed=False, traced=traced)
        balance = _balance(traced, found, K, tied)
        if best is None or balance > BETTER * best[2]:
            best = traced, found, balance
        if balance >= BALANCED:
            break
    assert best is not None
    return best


def _balance(traced: Traced, found: Profile, K: int, tied: Tied) -> float:
    """Of the best partition by FLOPs and bytes; 0 where there is none."""
    legal = traced.legal(tied)
    return solve(found.costs(), K, legal=legal).balance if len(legal) + 1 >= K else 0.0
