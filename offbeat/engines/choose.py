"""Which engine runs the stages of a pipeline, by its name or by how this process was started."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from offbeat.engines import Engine
from offbeat.engines.devices import present
from offbeat.engines.processes import TIMEOUT, Processes, available
from offbeat.engines.simulate import Simulate
from offbeat.engines.streams import Streams
from offbeat.errors import NotRecorded, UserError, unknown, warn_caller
from offbeat.method import Method

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

NAMES = ("simulate", "processes", "streams")


def choose_engine(
    name: str | None,
    K: int,
    *,
    method: Method,
    device: torch.device,
    replicas: int = 1,
    silence: float | None = None,
    timeout: float = TIMEOUT,
    mesh: DeviceMesh | None = None,
) -> Engine:
    """The engine of that name. Without a name: processes in a process group, streams on a GPU, otherwise simulate.

    A method whose operations cannot be recorded runs on simulate instead of streams, with a NotRecorded warning where
    streams was given. `silence` and `timeout` are for processes, see there.
    """
    if name not in (None, *NAMES):
        raise unknown("engine", str(name), NAMES)
    not_recorded = method.why_not_capturable()
    if mesh is not None and name not in (None, "processes"):
        raise UserError(f"engine={name!r} with mesh=, which is one of processes: leave out one of them")
    if name is None and (available() > 1 or mesh is not None):
        name = "processes"
    elif name is None:
        streams = device.type == "cuda" and K > 1 and not_recorded is None and replicas == 1
        name = "streams" if streams else "simulate"
    if name == "processes":
        return Processes(K, replicas=replicas, device=device, silence=silence, timeout=timeout, mesh=mesh)
    if name == "streams" and replicas > 1:
        raise UserError(
            f"engine='streams' with replicas={replicas}: on one GPU replicas share its time and gain nothing, use a "
            "larger M or batch instead, or engine='processes' with a GPU per process"
        )
    if name == "streams" and device.type != "cuda":
        raise UserError(
            f"engine='streams' on device '{device}': it runs the stages on streams of one GPU; use device='cuda', or "
            "engine='simulate' or 'processes'"
        )
    if name == "streams" and not_recorded is None:
        return Streams(K, present(device))
    if name == "streams":
        reason = f"{method.name} {not_recorded}: its stages are not recorded and run one after the other"
        warn_caller(reason, NotRecorded)
    return Simulate(K, replicas=replicas)
