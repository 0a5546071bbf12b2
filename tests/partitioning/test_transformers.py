"""Models of Hugging Face, cut at K = 2 and 4: back-propagation through the stages is that of the model, bit for bit."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from selected import only
from torch import nn

pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parent))

import hugging_face as hf
from chains import in_stages, same, wholly

from offbeat.errors import UserError
from offbeat.partitioning import partition, trace


def without_cache(model: nn.Module) -> nn.Module:
    """A copy without caches, as the stages are: keys and values in a cache have another layout, and so other bits."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if hasattr(module, "config"):
            module.config.use_cache = False
    return twin


def by_first_names(found: dict, model: nn.Module) -> dict:
    """The gradient of a parameter under its first name in the model, whatever its stage calls it."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    names = {f"gradient of {name}": f"gradient of {first[id(parameter)]}" for name, parameter in every}
    return {names.get(name, name): tensor for name, tensor in found.items()}


def check(model: nn.Module, stages: list[nn.Module], x: dict, *, training: bool, requires_grad: bool = True) -> None:
    expected = wholly(without_cache(model).train(training), x, requires_grad)
    model.train(training)
    found = by_first_names(in_stages(model, stages, x, snapshots=True, requires_grad=requires_grad), model)
    same(found, expected)


@pytest.mark.parametrize("name", only(("gpt2", "llama", "vit", "t5", "whisper"), hf.NAMES))
def test_back_propagation_through_four_stages_is_the_models(name):
    model = hf.build(name)
    names = list(model.state_dict())
    made = partition(model, 4, hf.batch(name), trace="sample")
    assert made.trace == "sample"
    assert made.K == 4
    assert bool(made.ties) == (name in hf.TIED)
    assert list(model.state_dict()) == names
    own = {id(parameter) for parameter in model.parameters()}
    held = [(key, id(parameter)) for stage in made.stages for key, parameter in stage.named_parameters()]
    assert {key for _, key in held} <= own
    assert len({key for _, key in held}) == len(held)  # one stage has each
    assert {key for key, _ in held} <= set(names)
    check(model, made.stages, hf.batch(name, padded=3), training=True)
    check(model, made.stages, hf.batch(name, 2), training=False)
    check(model, made.stages, hf.batch(name, 1), training=True)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_a_sample_without_a_mask_is_enough(name):
    model, x = hf.build(name), hf.batch(name)
    model.config.pad_token_id = 0
    del x["attention_mask"]
    made = partition(model, 2, x, trace="sample")
    check(model, made.stages, x, training=True)


@pytest.mark.slow
@pytest.mark.parametrize("inside", [False, True], ids=["between blocks", "inside blocks"])
@pytest.mark.parametrize("name", hf.NAMES)
def test_every_cut_is_exact_in_both_modes(name, inside):
    model = hf.build(name)
    traced = trace(model, hf.batch(name), way="sample", inside_blocks=inside)
    legal = traced.legal()
    for cuts in [*([cut] for cut in legal), legal]:
        for training in (True, False):
            check(model, traced.split(cuts), hf.batch(name, 2, padded=2), training=training)


@pytest.mark.slow
@pytest.mark.parametrize("name", hf.NAMES)
def test_two_stages_found_by_themselves_are_exact(name):
    model = hf.build(name)
    made = partition(model, 2, hf.batch(name))
    check(model, made.stages, hf.batch(name, 1, padded=4), training=True)


@pytest.mark.parametrize("name", ["gpt2", "mistral", "t5"])
def test_other_lengths_and_paddings_run_through_the_same_stages(name):
    model = hf.build(name)
    made = partition(model, 2, hf.batch(name, padded=2), trace="sample")
    for length in (4, 7, 13):
        check(model, made.stages, hf.batch(name, 2, length=length), training=True)
        check(model, made.stages, hf.batch(name, 2, length=length, padded=1), training=False)


def test_a_cut_model_drops_out_in_training_and_not_in_evaluation():
    model = hf.build("bert")
    x = hf.batch("bert")
    stages = partition(model, 2, x, trace="sample").stages

    def logits() -> torch.Tensor:
        return stages[1](stages[0](x)).logits

    assert not torch.equal(logits(), logits())
    model.eval()
    assert torch.equal(logits(), logits())


def test_the_last_stage_returns_what_the_model_returns():
    model = hf.build("llama")
    x = hf.batch("llama")
    made = partition(model, 2, x, trace="sample")
    output = made.stages[1](made.stages[0](x))
    assert type(output).__name__ == "CausalLMOutputWithPast"
    assert output.loss.shape == ()
    assert output.logits.shape == (hf.ROWS, hf.LENGTH, hf.WORDS)
    assert output.past_key_values is None
    assert any("use_cache is off" in note for note in made.notes)
    assert model.config.use_cache


def test_labels_travel_to_the_last_stage_with_the_messages():
    model = hf.build("gpt2")
    x = hf.batch("gpt2")
    traced = trace(model, x, way="sample")
    assert all("labels" in traced.boundary(cut) for cut in traced.legal())
    first, second = traced.split([4])
    assert any(value is x["labels"] for value in first(x))
    assert torch.equal(second(first(x)).loss, second(first(x)).loss) or model.training


def test_the_ties_of_a_model_are_reported_with_the_bytes_that_they_send():
    model, x = hf.build("gpt2"), hf.batch("gpt2")
    made = partition(model, 2, x)
    (tie,) = made.ties
    assert tie.owner == 1
    assert tie.names == {1: "transformer.wte.weight", 2: "lm_head.weight"}
    assert tie.bytes == 4 * model.lm_head.weight.numel()
    alone = partition(copy.deepcopy(model), 2, x, cuts=made.cuts, tied="copies")
    sent = [each.summary()[0].boundary for each in (made, alone)]
    assert sent[0] == sent[1] + tie.bytes
    assert any("transformer.wte.weight of stage 1, 2,560 bytes, is sent with every batch" in n for n in made.notes)


def test_a_batch_of_other_keys_is_refused_with_those_of_the_sample():
    x = hf.batch("llama")
    stage = partition(hf.build("llama"), 2, x, trace="sample").stages[0]
    with pytest.raises(UserError, match="a dict of input_ids given where the sample was a dict of input_ids, atten"):
        stage({"input_ids": x["input_ids"]})


def test_images_of_another_size_are_refused_where_the_model_depends_on_it():
    stage = partition(hf.build("vit"), 2, hf.batch("vit"), trace="sample").stages[0]
    with pytest.raises(UserError, match=r"pixel_values of shape .* traced for \(any, 3, 8, 8\): give batches of this"):
        stage({"pixel_values": torch.randn(2, 3, 12, 12), "labels": torch.tensor([0, 1])})


@pytest.mark.parametrize("training", only([True], [True, False]))
@pytest.mark.parametrize("name", hf.LISTENING)
def test_a_model_that_sets_requires_grad_on_a_batch_is_exact_at_every_cut(name, training):
    model, x = hf.build(name), hf.batch(name)
    traced = trace(model, sample=x, way="sample")
    assert len([cut for cut in traced.legal_cuts if "layers" in traced.units[cut].name]) >= 4
    for cut in traced.legal_cuts:
        check(model, traced.split([cut]), x, training=training, requires_grad=False)


@pytest.mark.parametrize("changed", [{"layerdrop": 0.1}, {"apply_spec_augment": True, "mask_time_length": 2}])
def test_settings_that_prevent_cuts_are_named_with_their_remedy(changed):
    remedy = f"set model.config.{next(iter(changed))} = "
    with pytest.raises(UserError, match=remedy):
        partition(hf.build("hubert", **changed), 20, hf.batch("hubert"))


SCRIPT = """
import hashlib, os, sys
sys.path[:0] = [{here!r}]
import torch, offbeat
import hugging_face as hf

def main():
    torch.set_num_threads(1)
    model, batches = hf.build({name!r}), [hf.batch({name!r}, rows, padded=rows) for rows in (3, 3, 2, 3, 1, 3)]
    pipe = offbeat.Pipeline(model, K=2, method="adl", M=2, loss=lambda output, y: output.loss,
                            optimizer=lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9))
    pipe.fit([(batch, torch.zeros(len(batch["labels"]))) for batch in batches])
    found = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        found.update(name.encode() + tensor.contiguous().numpy().tobytes())
    line = "cuts " + str(pipe.cuts) + " hash " + found.hexdigest() + "\\n"
    os.write(1, line.encode())  # at once: both processes write to the same pipe
    pipe.close()

main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "bert", "vit", "gpt2", "t5"])
def test_two_processes_train_the_weights_of_the_simulator(name, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(here=str(Path(__file__).parent), name=name))
    alone = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=200, check=False)
    assert alone.returncode == 0, alone.stderr[-2000:]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    together = subprocess.run(torchrun, capture_output=True, text=True, timeout=200, check=False)
    assert together.returncode == 0, together.stderr[-3000:]
    expected = alone.stdout.strip()
    assert expected.startswith("cuts [")
    assert [line for line in together.stdout.splitlines() if line.startswith("cuts")] == [expected] * 2


def test_cuts_are_where_they_balance():
    for name in ("llama", "bert"):
        made = partition(hf.build(name), 4, hf.batch(name))
        assert made.trace == "sample"
        assert made.balance >= 0.85, str(made)
