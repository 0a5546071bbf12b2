"""What happens after a failure: a pipeline does not continue."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from offbeat.core.precision import PrecisionPolicy
from offbeat.engines import Engine
from offbeat.errors import UserError, named


class Guard:
    """Around everything that runs stages. After a failure their programs no longer agree, so every later call raises.

    Also switches torch to the precision of the pipeline meanwhile.
    """

    def __init__(self, engine: Engine, precision: PrecisionPolicy) -> None:
        self.engine, self.precision = engine, precision
        self.failure: str | None = None  # why the pipeline cannot continue

    @contextmanager
    def __call__(self, *, computes: bool = True) -> Iterator[None]:
        """computes=False: the caller may run other code in between, which keeps torch's own precision."""
        if self.failure is not None:
            raise UserError(f"this pipeline has stopped, make a new one: {self.failure}")
        try:
            with self.engine.guard(), self.precision.switched() if computes else nullcontext():
                yield
        except Exception as error:
            self.failure = self.failure or named(error)
            raise
