"""Batches as dicts of keyword arguments, losses that the model computes, and models that return to their user."""

from __future__ import annotations

import collections
import copy
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import offbeat
from offbeat.engines.streams import Streams
from offbeat.errors import UserError

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "partitioning"))
import hugging_face as hf  # noqa: E402


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


class Net(nn.Module):
    """Returns {"loss", "scores"} where it gets labels; only the last block reads `scale` and `labels`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor, scale: Tensor | None = None, labels: Tensor | None = None) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x)
        scores = x if scale is None else x * scale
        return {"scores": scores} if labels is None else {"scores": scores, "loss": F.cross_entropy(scores, labels)}


class Tuples(Net):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        found = super().forward(x, labels=labels)
        return tuple(found[key] for key in ("loss", "scores") if key in found)


def batches(count: int = 8, rows: int = 6, *, scale: bool = True) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        one = {"x": torch.randn(rows, 4, generator=generator), "labels": torch.randint(4, (rows,), generator=generator)}
        found.append({**one, "scale": torch.rand(rows, 1, generator=generator)} if scale else one)
    return found


def net(kind: type[nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def trained(model: nn.Module, data: Any, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of a pipeline, two stages of ADL by default."""
    options = {"K": 2, "method": "adl", "M": 2, "optimizer": sgd, **options}
    pipe = offbeat.Pipeline(model, **options)
    losses = [float(pipe.step(batch)) for batch in data]
    pipe.drain()
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def plainly(model: nn.Module, data: Any) -> tuple[list[float], dict[str, Tensor]]:
    """The plain training loop of a model that computes its loss."""
    optimizer, losses = sgd(model.parameters()), []
    for batch in data:
        output = model(**batch)
        loss = output[0] if isinstance(output, tuple) else output["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def same(one: Any, other: Any) -> None:
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    for name, tensor in one[1].items():
        assert torch.equal(tensor, other[1][name]), name


def without_dropout(name: str) -> nn.Module:
    """A model of transformers in training mode; with caches off, whose keys and values have other bits."""
    model = hf.build(name, tie_word_embeddings=False)
    model.config.use_cache = False
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


# ---- what a batch may be


@pytest.mark.parametrize("K", [1, 2, 4])
@pytest.mark.parametrize("kind", [Net, Tuples])
def test_back_propagation_with_the_models_loss_is_the_plain_loop(kind, K):
    data = batches(scale=kind is Net)
    found = trained(net(kind), data, K=K, method=offbeat.BP(), M=None)
    same(found, plainly(net(kind), data))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("K", [2, 4])
def test_back_propagation_of_a_language_model_is_its_own_loop(name, K):
    data = [hf.batch(name, rows, padded=rows) for rows in (3, 3, 2, 3)]
    found = trained(without_dropout(name), data, K=K, method=offbeat.BP(), M=None)
    same(found, plainly(without_dropout(name), data))


def test_a_loss_of_output_and_batch_is_that_of_the_model():
    data = batches()

    def loss(output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(output["scores"], batch["labels"])

    own = trained(net(), data)
    same(trained(net(), data, loss=loss), own)


def test_a_loss_of_output_and_target_gets_the_given_target():
    data, options = batches(), {"K": 2, "M": 2, "cuts": ["blocks.2"], "optimizer": sgd}
    model = net()
    pipe = offbeat.Pipeline(model, loss=lambda output, y: F.cross_entropy(output["scores"], y), **options)
    losses = [float(pipe.step({"x": batch["x"], "scale": batch["scale"]}, batch["labels"])) for batch in data]
    pipe.drain()
    same((losses, model.state_dict()), trained(net(), data, **options))


def test_other_mappings_are_batches_too():
    data = batches()
    expected = trained(net(), data)
    same(
        trained(net(), [collections.UserDict(batch) for batch in data], sample=collections.UserDict(data[0])), expected
    )
    same(trained(net(), [collections.OrderedDict(batch) for batch in data]), expected)


def test_keys_in_another_order_are_the_same_batch():
    data = batches()
    turned = [dict(reversed(batch.items())) if t % 2 else batch for t, batch in enumerate(data)]
    expected = trained(net(), data)
    same(trained(net(), turned), expected)
    same(trained(net(), turned, engine=Streams(2, torch.device("cpu"))), expected)


def recorded(
    model: nn.Module, data: Any, K: int, *, eager: int, **options: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """The same by recorded stages, with that many batches that do not fit the recordings in each stage."""
    pipe = offbeat.Pipeline(model, K=K, engine=Streams(K, torch.device("cpu")), optimizer=sgd, **options)
    losses = [float(pipe.step(batch)) for batch in data]
    pipe.drain()
    assert [worker.executor.irregular for worker in pipe.workers] == [eager] * K
    return losses, model.state_dict()


@pytest.mark.parametrize("method", [offbeat.BP(M=2), offbeat.ADL(M=2), offbeat.ADL(M=2, weights="replay")])
def test_recorded_stages_train_as_the_simulator(method):
    data = [*batches(12), *batches(1, 2)]
    found = recorded(net(), data, 4, eager=1, method=method)
    same(found, trained(net(), data, K=4, method=method, M=None))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_recorded_stages_of_a_language_model_train_as_the_simulator(name):
    data = [hf.batch(name, rows, padded=rows) for rows in (3, 3, 3, 3, 3, 2, 3)]
    found = recorded(without_dropout(name), data, 2, eager=1, method=offbeat.ADL(M=2))
    same(found, trained(without_dropout(name), data))


def test_a_model_with_dropout_is_not_recorded_and_trains_the_same():
    data = [hf.batch("bert", padded=1) for _ in range(4)]
    with pytest.warns(offbeat.errors.NotRecorded, match="is not recorded and runs eagerly: it draws random"):
        found = recorded(hf.build("bert"), data, 2, eager=4, method=offbeat.ADL(M=2))
    same(found, trained(hf.build("bert"), data))


def test_micro_batches_split_every_value_of_a_dict():
    data = batches(6, rows=8)
    found = trained(net(), data, method=offbeat.GPipe(m=4), M=None)
    losses, weights = plainly(net(), data)
    assert found[0] == pytest.approx(losses, rel=1e-5)
    for name, tensor in found[1].items():
        torch.testing.assert_close(tensor, weights[name])


def test_gradients_weighted_by_samples_count_the_rows_of_a_dict():
    data = [*batches(3), *batches(1, 2)]
    found = trained(net(), data, K=1, method=offbeat.BP(M=2), M=None, weighting="samples")
    again = trained(net(), data, K=4, method=offbeat.BP(M=2), M=None, weighting="samples")
    equal = trained(net(), data, K=4, method=offbeat.BP(M=2), M=None)
    same(found, again)
    assert any(not torch.equal(found[1][name], equal[1][name]) for name in found[1])


# ---- loaders and evaluation


def test_fit_and_evaluate_take_a_data_loader_of_dicts():
    rows = [{key: value[n] for key, value in batch.items()} for batch in batches(4) for n in range(6)]
    loader = DataLoader(rows, batch_size=5)  # the last batch has 4
    pipe = offbeat.Pipeline(net(), K=2, M=2, optimizer=sgd)
    before = pipe.evaluate(loader)
    pipe.fit(loader, epochs=4)
    after = pipe.evaluate(loader)
    assert before["samples"] == after["samples"] == 24
    assert after["loss"] < before["loss"]
    assert (after["error"], after["top5"]) == (None, None)
    model = pipe.model.eval()
    with torch.no_grad():
        expected = sum(float(model(**batch)["loss"]) * len(batch["x"]) for batch in loader) / 24
    assert math.isclose(after["loss"], expected, rel_tol=1e-12)


def test_a_metric_gets_the_output_and_the_batch():
    loader = batches(3)
    pipe = offbeat.Pipeline(net(), K=2, optimizer=sgd)

    def wrong(output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        return 100 * (output["scores"].argmax(1) != batch["labels"]).float().mean()

    def named(output: dict[str, Tensor], batch: dict[str, Tensor]) -> dict[str, Any]:
        return {"wrong": wrong(output, batch), "perplexity": output["loss"].exp()}

    result = pipe.evaluate(loader, metric=wrong)
    again = pipe.evaluate(loader, metric=named)
    assert again["wrong"] == result["error"] > 0
    assert again["error"] is None
    assert again["perplexity"] >= math.exp(again["loss"])  # the mean over batches


def test_a_model_without_a_loss_is_refused_with_what_to_give():
    with pytest.raises(UserError, match=r"the output of the model has no loss .*labels, .*loss=\.\.\. of"):
        trained(net(), [{"x": torch.ones(2, 4)}])
    with pytest.raises(
        UserError, match=r"the output of the model, shape \(2, 4\) float32, is not a loss.*loss=\.\.\. of"
    ):
        trained(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), [torch.ones(2, 4)])


def test_local_losses_need_a_loss_function():
    with pytest.raises(UserError, match=r"dgl trains .* loss=None.*give loss="):
        offbeat.Pipeline(net(), K=2, method="dgl", optimizer=sgd)


def test_other_batches_of_a_loader_are_refused_in_one_line():
    pipe = offbeat.Pipeline(net(), K=2, optimizer=sgd)
    for run in (pipe.fit, pipe.evaluate):
        with pytest.raises(UserError, match=r"batch 0 of the loader is of type Tensor: give pairs .* or dicts"):
            run([torch.ones(2, 4)])
        pipe = offbeat.Pipeline(net(), K=2, optimizer=sgd)


@pytest.mark.parametrize("weights", ["stash", "hybrid", "replay"])
def test_batches_in_flight_are_saved_and_loaded_with_their_samples(weights):
    data, method = [*batches(6), *batches(4, 3)], offbeat.ADL(M=2, weights=weights)
    options = {"K": 2, "method": method, "M": None, "weighting": "samples", "sample": data[0]}
    pipe = offbeat.Pipeline(net(), K=2, method=method, weighting="samples", sample=data[0], optimizer=sgd)
    pipe.keep()
    for batch in data[:7]:
        pipe.step(batch)
    saved = copy.deepcopy(pipe.stage_states())
    again = offbeat.Pipeline(net(), K=2, method=method, weighting="samples", sample=data[0], optimizer=sgd)
    again.load_stage_states(saved, 7)
    losses = [float(again.step(batch)) for batch in data[7:]]
    again.drain()
    expected = trained(net(), data, **options)
    same((losses, again.model.state_dict()), (expected[0][7:], expected[1]))


# ---- building with the first batch


@pytest.mark.parametrize("cuts", [["blocks.2"], ["blocks.1"]])
def test_cuts_of_a_model_that_needs_a_batch_are_made_with_the_first(cuts):
    data = batches()
    found = trained(net(), data, cuts=cuts)
    same(found, trained(net(), data, cuts=cuts, sample=data[0]))


def test_cuts_of_a_model_that_torch_fx_cannot_trace_are_made_with_the_first_batch():
    class Checked(Net):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[1] != 4:
                raise ValueError("4 features")
            return super().forward(x)["scores"]

    options = {"K": 2, "loss": F.cross_entropy, "optimizer": sgd}
    pipe = offbeat.Pipeline(net(Checked), cuts=["blocks.2"], **options)
    early = offbeat.Pipeline(net(Checked), cuts=["blocks.2"], sample=torch.ones(6, 4), **options)
    assert (len(pipe.parts), len(early.parts)) == (0, 2)
    for batch in batches():
        pipe.step(batch["x"], batch["labels"])
        early.step(batch["x"], batch["labels"])
    assert [len(list(part.parameters())) for part in pipe.parts] == [4, 4]
    same(([], pipe.drain().state_dict()), ([], early.drain().state_dict()))
    assert offbeat.Pipeline(nn.Sequential(*net().blocks), cuts=[2], **options).parts  # needs no batch


def test_named_cuts_of_a_language_model_need_no_sample():
    data = [hf.batch("llama") for _ in range(3)]
    model = without_dropout("llama")
    pipe = offbeat.Pipeline(model, K=2, cuts=["model.layers.2"], optimizer=sgd, method="bp")
    assert not pipe.parts
    for batch in data:
        pipe.step(batch)
    assert any(name.startswith("model.layers.2") for name, _ in pipe.parts[1].named_parameters())
    assert not any(name.startswith("model.layers.2") for name, _ in pipe.parts[0].named_parameters())


# ---- what is frozen


@pytest.mark.parametrize("method", ["bp", "adl"])
@pytest.mark.parametrize("later", [True, False])
def test_a_parameter_frozen_or_unfrozen_later_is_refused_in_one_line(method, later):
    model, data = net(), batches()
    parameter = model.blocks[1][0].weight
    parameter.requires_grad_(not later)
    pipe = offbeat.Pipeline(model, K=2, method=method, optimizer=sgd)
    pipe.step(data[0])
    parameter.requires_grad_(later)
    now = "requires gradients" if later else "is frozen"
    with pytest.raises(UserError, match=rf"blocks\.1\.0\.weight {now} since the pipeline was built: .*new Pipeline"):
        pipe.step(data[1])
    parameter.requires_grad_(not later)
    pipe.step(data[1])  # undone: it continues
    pipe.drain()


# ---- the model that comes back


def generates_and_saves(model: nn.Module, folder: Path, *, first: bool = True) -> None:
    """As any model of transformers, which writes files in the first process alone."""
    kind = type(model)
    model.eval()
    prompt = hf.batch("llama", 2)["input_ids"][:, :4]
    with torch.no_grad():
        text = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5, do_sample=False)
    assert text.shape == (2, 9)
    model.save_pretrained(folder / "saved")
    if not first:
        return
    again = kind.from_pretrained(folder / "saved").eval()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    torch.save(model.state_dict(), folder / "model.pt")
    kind(model.config).load_state_dict(torch.load(folder / "model.pt"))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_trained_model_generates_and_is_saved_as_before(name, tmp_path):
    model = hf.build(name, tie_word_embeddings=False)
    names, before = list(model.state_dict()), copy.deepcopy(model.state_dict())
    pipe = offbeat.Pipeline(model, K=2, M=2, optimizer=sgd)
    pipe.fit([hf.batch(name) for _ in range(4)])
    assert pipe.model is model
    assert list(model.state_dict()) == names
    assert any(not torch.equal(before[key], value) for key, value in model.state_dict().items())
    generates_and_saves(model, tmp_path)
    pipe.fit([hf.batch(name) for _ in range(2)])  # and training continues


SCRIPT = """
import hashlib, sys
from pathlib import Path
sys.path[:0] = {paths!r}
import torch, offbeat
import hugging_face as hf
import test_batches as batches

def main():
    torch.set_num_threads(1)
    model = hf.build({name!r}, tie_word_embeddings=False)
    pipe = offbeat.Pipeline(model, K=2, method="adl", M=2, optimizer=batches.sgd, weighting="samples")
    loader = [hf.batch({name!r}, rows, padded=rows) for rows in (3, 3, 2, 3, 1, 3)] if pipe.first else None
    pipe.fit(loader)
    pipe.step(hf.batch({name!r}) if pipe.first else None)
    result = pipe.evaluate(loader, metric=lambda output, batch: len(batch["labels"]))
    pipe.gather()
    found = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        found.update(name.encode() + tensor.contiguous().numpy().tobytes())
    batches.generates_and_saves(model, Path(sys.argv[1]), first=pipe.first)
    print("cuts", pipe.cuts, "result", result, "hash", found.hexdigest(), flush=True)
    pipe.close()

main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_two_processes_train_and_return_the_model_of_the_simulator(name, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(paths=[str(HERE.parent / "partitioning"), str(HERE)], name=name))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    printed = []
    for way in ([], torchrun):
        command = [sys.executable, *way, str(script), str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        printed += [line for line in done.stdout.splitlines() if line.startswith("cuts")]
    assert len(printed) == 3
    assert len(set(printed)) == 1
