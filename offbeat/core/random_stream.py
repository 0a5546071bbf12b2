"""The random stream of a stage: dropout and the like draw from it and from nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from offbeat.seeds import derive


class RandomStream:
    """The state of torch's global generators for this stage, separate from the data's and from every other stage's.

    Results then depend neither on the engine nor on how many stages share a process.
    """

    def __init__(self, device: torch.device, *name: object) -> None:
        own = derive(*name)
        self.device = device
        self.frozen = False  # while the state of the generators may be neither read nor set
        self.state = [torch.Generator(where).manual_seed(own).get_state() for where in self._generators()]

    def _generators(self) -> list[torch.device]:
        return [torch.device("cpu")] + ([self.device] if self.device.type == "cuda" else [])

    def _get(self) -> list[torch.Tensor]:
        return [torch.get_rng_state()] + ([torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else [])

    def _set(self, state: list[torch.Tensor]) -> None:
        torch.set_rng_state(state[0])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state[1], self.device)

    @contextmanager
    def drawing(self, replay: list[torch.Tensor] | None = None) -> Iterator[None]:
        """Draw from this stream; with `replay`, repeat the draws that followed that state instead."""
        if self.frozen:
            yield
            return
        outside = self._get()
        self._set(self.state if replay is None else replay)
        try:
            yield
        finally:
            if replay is None:
                self.state = self._get()
            self._set(outside)

    def drawn(self, since: list[torch.Tensor]) -> bool:
        """Whether anything was drawn since that state; to be called within `drawing`."""
        return not all(map(torch.equal, self._get(), since))
