"""Parameters that several stages use: tied weights, such as an embedding that is also the output layer.

shared    The first stage that uses the parameter owns it: its optimizer alone steps it, under the method's staleness of
          that stage. The weight of a batch's forward there is sent with the batch's activations, through the stages
          between, to those that use it too. Its gradient comes back with those of the activations and is added at the
          owner to that of the same batch. So each batch sees one version of the parameter, and its gradient is that of
          the unsplit model. Costs: the parameter and its gradient cross these cuts with every batch, and every batch in
          flight in the later stages holds a copy.
copies    Each stage gets a parameter of its own, equal at the start and trained independently from there: another
          model. Where the model has another name for it, the copy becomes the model's parameter of that name; the copy
          of a layer that is called in two stages has no name in the model, and stays with its stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Tied = Literal["shared", "copies"]


@dataclass(frozen=True)
class TiedParameter:
    """A parameter that several stages use; the owner is the first of them.

    names   stage (from 1): the first name under which it uses the parameter
    shared  whether the others receive the owner's, or have copies of their own
    bytes   of the parameter; where it is shared, every batch carries them across each cut from `owner` to `last`
    """

    names: dict[int, str]
    shared: bool
    bytes: int

    @property
    def owner(self) -> int:
        return min(self.names)

    @property
    def last(self) -> int:
        return max(self.names)

    @property
    def value(self) -> str:
        """The name of the parameter among the values that cross cuts; none that an operation has."""
        return f"parameter {self.names[self.owner]}"

    def sent(self, k: int) -> bool:
        """Whether stage k sends it to the next."""
        return self.shared and self.owner <= k < self.last

    def note(self) -> str:
        """One line about a shared parameter."""
        others = ", ".join(f"it is {name} of stage {k}" for k, name in sorted(self.names.items()) if k != self.owner)
        return (
            f"{self.names[self.owner]} of stage {self.owner}, {self.bytes:,} bytes, is sent with every batch: {others}"
        )
