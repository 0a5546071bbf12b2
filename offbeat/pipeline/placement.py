"""Where the stages run: engine, device, precision and messages, checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from offbeat.core.compression import Messages, check_messages
from offbeat.core.precision import Precision, PrecisionPolicy
from offbeat.engines import Engine
from offbeat.engines.choose import choose_engine
from offbeat.engines.processes import seconds_of
from offbeat.method import Method
from offbeat.pipeline import checks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Placement:
    """What was given: `engine` may be a name, or None; `device` is None where none was given."""

    K: int
    replicas: int
    mesh: DeviceMesh | None
    engine: Engine | str | None
    device: torch.device | None
    timeout: float
    precision: PrecisionPolicy
    messages: Messages

    @classmethod
    def of(
        cls,
        engine: Engine | str | None,
        K: int,
        *,
        replicas: int,
        mesh: DeviceMesh | None = None,
        device: torch.device | str | None,
        timeout: float,
        precision: Precision,
        messages: Messages,
    ) -> Placement:
        timeout = seconds_of(timeout, "timeout")
        wanted = checks.device_of(device)
        if not isinstance(engine, str | None):
            checks.check_engine(engine, K, replicas, mesh=mesh)
            wanted = engine.device_for(wanted)
        policy = PrecisionPolicy.of(precision, wanted or torch.device("cpu"))
        check_messages(messages, K, streams=engine == "streams")
        return cls(K, replicas, mesh, engine, wanted, timeout, policy, messages)

    def start(self, method: Method) -> Engine:
        """The engine that was given, or the one for how this process was started."""
        engine = self.engine
        if isinstance(engine, str | None):
            device = self.device or torch.device("cpu")
            engine = choose_engine(
                engine,
                self.K,
                method=method,
                device=device,
                replicas=self.replicas,
                timeout=self.timeout,
                mesh=self.mesh,
            )
        check_messages(self.messages, self.K, streams=engine.on_one_device)
        return engine
