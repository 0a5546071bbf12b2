"""Whether the whole model of this process is the newest one."""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.errors import ModelOutdated, warn_caller


@dataclass
class ModelState:
    """whole: this process has all stages; newest: no batch since the weights of the others were received."""

    whole: bool
    newest: bool = True
    warned: bool = False

    def check(self) -> None:
        """Warn once where the caller of the caller reads weights that are not the newest."""
        if self.whole or self.newest or self.warned:
            return
        self.warned = True
        warn_caller(
            "pipe.model was read in a process that does not train all of its stages: the weights of the others are as "
            "of the last drain(), gather() or load(); call gather() in every process first",
            ModelOutdated,
        )
