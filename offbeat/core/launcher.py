"""How the tensor work of a stage gets to the device: at once, or recorded and launched later."""

from __future__ import annotations

from typing import Protocol


class Launcher(Protocol):
    """Launches the tensor work of one stage; that of graphs/recorded_stage.py may be deferred."""

    def flush(self) -> None:
        """Launch all work that is queued."""

    def pause(self) -> None:
        """A message from another stage has not arrived yet."""

    def end_turn(self) -> None:
        """The stage has done all operations of its local iteration."""

    def restart(self) -> None:
        """All batches are done; the program starts again."""

    def settle(self) -> None:
        """Wait for the device and bring the figures up to date; raises NotFinite for what was found there."""

    def reset(self) -> None:
        """Tensors of the stage are about to be replaced: launch all work, and drop what relies on their addresses."""

    def reserved(self) -> int:
        """Bytes held for batches and versions beyond those that the stage has used at most so far."""


class Immediate:
    """Does all work when it is asked to, so that nothing is ever left to do."""

    def flush(self) -> None:
        pass

    def pause(self) -> None:
        pass

    def end_turn(self) -> None:
        pass

    def restart(self) -> None:
        pass

    def settle(self) -> None:
        pass

    def reset(self) -> None:
        pass

    def reserved(self) -> int:
        return 0
