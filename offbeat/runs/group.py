"""What the processes that torchrun has started agree upon before they are stages of a pipeline."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from offbeat.errors import StageLost, UserError, first_line
from offbeat.runs import launch

KEY = "offbeat/from-first"


def from_first(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `make` returns in the first process, as JSON keeps it, in every process; its UserError, likewise.

    So that the folder of a run is read by one process: it need not be there for the others, and they get the same
    answer. Without torchrun, and in workers that were started here, each process makes its own.
    """
    if not launch.joined_group() or launch.is_worker():
        return make()
    import torch.distributed as dist

    from offbeat.engines.processes import available, join

    if not dist.is_initialized():
        join(available())
    store = dist.distributed_c10d._get_default_store()
    try:
        if dist.get_rank() == 0:
            store.set(KEY, json.dumps(_outcome(make)))
        told: dict[str, Any] = json.loads(store.get(KEY))
        dist.barrier()  # the store may end with the first process
    except RuntimeError as error:
        raise StageLost(f"another process is gone: {first_line(error)}") from error
    if "refused" in told:
        raise UserError(told["refused"])
    made: dict[str, Any] = told["made"]
    return made


def _outcome(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return {"made": make()}
    except UserError as error:
        return {"refused": str(error)}
