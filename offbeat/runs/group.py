"""What the processes of torchrun agree on before they are stages of a pipeline."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from offbeat.errors import StageLost, attempted, first_line, result_of
from offbeat.runs import launch

KEY = "offbeat/from-first"


def from_first(make: Callable[[], dict[str, Any]], *, key: str = "recipe") -> dict[str, Any]:
    """Call `make` in the first process, and return its result (through JSON), or raise its UserError, in every process.

    So only one process reads the folder of a run, which the others may not see. Without torchrun, and in workers of the
    launcher, each process calls `make` itself. `key` names what they agree on, once per program.
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
            store.set(f"{KEY}/{key}", json.dumps(attempted(make)))
        outcome: dict[str, Any] = json.loads(store.get(f"{KEY}/{key}"))
        dist.barrier()  # the store may end with the first process
    except RuntimeError as error:
        raise StageLost(f"another process has ended: {first_line(error)}") from error
    made: dict[str, Any] = result_of(outcome)
    return made
