"""A training run from Python: build a recipe, train it into a run folder, resume it, read the record.

    python examples/train_recipe.py [RUN]

`offbeat train` does the same from the command line. With engine="processes" (the default for K > 1 without a GPU), the
stages are worker processes that `offbeat.train` starts.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import offbeat
from offbeat.runs.record import lines


def main(run: Path) -> None:
    recipe = offbeat.make_recipe(
        model="resnet8",
        data="digits",
        method="adl",
        K=2,
        M=2,
        epochs=1,
        engine="simulate",
        checkpoint_every="1e",
    )
    print(f"{recipe.model} on {recipe.data}, lr {recipe.lr:g}: the settings that were not given are the paper's")
    offbeat.train(recipe, out=run)

    result = offbeat.train(resume=run, epochs=2)
    assert result is not None  # it is None only in processes of torchrun without the first stage
    print(f"test error {result['error']:.2f} %, staleness per stage {result['staleness']}, in updates")

    for line in lines(run):
        if line["kind"] == "epoch":
            print(f"epoch {line['epoch']}: train loss {line['train_loss']:.3f}, test error {line['test_error']:.2f} %")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(Path(folder) / "run")
