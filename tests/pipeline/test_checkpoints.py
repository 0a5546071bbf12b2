"""Whole checkpoints of a pipeline: save, load and resume in one call each, in one process."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from selected import some
from test_contract import batches, network, sgd
from torch import nn

import offbeat
from offbeat.checkpoint import CheckpointFailed, ls
from offbeat.checkpoint.export import export
from offbeat.errors import UserError

cross_entropy = nn.functional.cross_entropy
DATA = batches(23)
EIGHTS = [(torch.randn(8, 3, 5, 5, generator=torch.Generator().manual_seed(t)), torch.arange(8) % 3) for t in range(7)]


def schedule(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.7)


def build(K: int = 3, **options) -> offbeat.Pipeline:
    settings = {"method": "adl", "M": 2, "optimizer": sgd, "loss": cross_entropy, "scheduler": schedule, "seed": 3}
    return offbeat.Pipeline(network(), K, **{**settings, **options})


def shuffled(epoch: int) -> list:
    order = torch.randperm(len(DATA), generator=torch.Generator().manual_seed(epoch)).tolist()
    return [DATA[index] for index in order]


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


class Stop(Exception):
    pass


def stop_after(batches: int, pipe: offbeat.Pipeline, folder, **options):
    """A callback that saves after that many batches and stops training."""

    class Save:
        def on_step(self, step) -> None:
            if step.batch + 1 == batches:
                pipe.save(folder, **options)
                raise Stop

    return Save()


@pytest.mark.parametrize("given", [{}, {"sample": DATA[0][0]}, {"cuts": [1, 2]}], ids=["late", "sample", "cuts"])
@pytest.mark.parametrize("at", some([1, 9, 23, 30, 46], of=2))
def test_fit_resumes_in_the_middle_of_an_epoch_bit_for_bit(at, given, tmp_path):
    whole, first, second = build(**given), build(**given), build(**given)
    whole.fit(shuffled, 2)
    with pytest.raises(Stop):
        first.fit(shuffled, 2, callbacks=[stop_after(at, first, tmp_path)])
    second.load(tmp_path)
    assert second.batches == at
    second.fit(shuffled, 2, resume=True)
    assert same(second.model, whole.model)
    assert second.batches == whole.batches == 46


def test_a_checkpoint_of_the_end_of_an_epoch_resumes_with_the_next(tmp_path):
    whole, first, second, seen = build(), build(), build(), []

    class Save:
        def on_epoch_end(self, step) -> None:
            first.save(tmp_path)
            raise Stop

    with pytest.raises(Stop):
        first.fit(shuffled, 2, callbacks=[Save()])
    whole.fit(shuffled, 2)
    second.load(tmp_path)
    second.fit(lambda epoch: seen.append(epoch) or shuffled(epoch), 2, resume=True)
    assert seen == [1]
    assert same(second.model, whole.model)


def test_micro_batches_of_an_update_resume_bit_for_bit(tmp_path):
    whole, first, second = (build(batch=8, M=4) for _ in range(3))
    whole.fit(EIGHTS, 2)
    with pytest.raises(Stop):
        first.fit(EIGHTS, 2, callbacks=[stop_after(13, first, tmp_path)])
    second.load(tmp_path)
    second.fit(EIGHTS, 2, resume=True)
    assert same(second.model, whole.model)


def test_replicas_of_one_process_resume_bit_for_bit(tmp_path):
    whole, first, second = (build(2, replicas=2) for _ in range(3))
    whole.fit(DATA, 2)
    with pytest.raises(Stop):
        first.fit(DATA, 2, callbacks=[stop_after(15, first, tmp_path)])
    second.load(tmp_path)
    second.fit(DATA, 2, resume=True)
    assert same(second.model, whole.model)


@pytest.mark.parametrize("R", [1, 3, 4])
def test_another_number_of_replicas_resumes_after_what_was_trained(R, tmp_path):
    first, second, seen = build(2, replicas=2), build(2, replicas=R), []
    loader = [(x.clone(), y) for x, y in DATA]
    with pytest.raises(Stop):
        first.fit(loader, 1, callbacks=[stop_after(6, first, tmp_path)])
    second.load(tmp_path)
    step = second._local.step
    second._local.step = lambda given: step(given) or seen.extend(x for x, _ in given)
    with pytest.warns(offbeat.NotRestored, match="2 batches of each of 2 replicas that were in flight"):
        second.fit(loader, 1, resume=True)
    left = loader[12:][: 11 // R * R]
    assert len(seen) == len(left)
    assert all(one is x for one, (x, _) in zip(seen, left, strict=True))


def test_another_m_of_micro_batches_resumes_after_what_was_trained(tmp_path):
    first, second = build(batch=8, M=4), build(batch=8, M=2)
    with pytest.raises(Stop):
        first.fit(EIGHTS, 1, callbacks=[stop_after(12, first, tmp_path)])
    second.load(tmp_path)
    with pytest.warns(offbeat.NotRestored, match="in flight"):
        second.fit(EIGHTS, 1, resume=True)
    assert second.batches == 12 + 2 * (7 - 3)


@pytest.mark.parametrize("optimizer", [sgd, torch.optim.Adam])
def test_replicas_stay_equal_after_a_checkpoint_of_a_changed_pipeline(optimizer, tmp_path):
    first, second = (build(2, optimizer=optimizer, M=M, replicas=R, sample=DATA[0][0]) for M, R in ((2, 3), (1, 2)))
    first.fit(DATA)
    first.save(tmp_path)
    second.load(tmp_path)
    second.fit(DATA)
    one, other = (assembly.stages[1].parameters for assembly in second._local.assembly.replicas)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_another_loader_than_the_saved_one_is_refused(tmp_path):
    first, second = build(), build()
    with pytest.raises(Stop):
        first.fit(DATA, 1, callbacks=[stop_after(9, first, tmp_path)])
    second.load(tmp_path)
    with pytest.raises(UserError, match="9 batches of epoch 0 have been trained, but its loader now has 4"):
        second.fit(DATA[:4], 1, resume=True)
    with pytest.raises(UserError, match="first_epoch=1 with resume=True"):
        build().fit(DATA, 2, first_epoch=1, resume=True)


def test_a_finished_fit_has_nothing_left_to_resume(tmp_path):
    first, second = build(), build()
    first.fit(DATA, 2)
    first.save(tmp_path)
    second.load(tmp_path)
    second.fit(DATA, 2, resume=True)
    assert (second.batches, same(second.model, first.model)) == (46, True)
    second.fit(DATA, 3, resume=True)
    assert second.batches == 69


def test_a_checkpoint_after_the_last_epoch_is_completed_by_a_resumed_fit(tmp_path):
    whole, saved, again = build(), build(), build()
    whole.fit(DATA, 2)
    saved.fit(DATA, 2, drain=False)
    saved.save(tmp_path)
    again.load(tmp_path)
    again.fit(DATA, 2, resume=True)
    assert again.batches == 2 * len(DATA)
    assert same(again.model, whole.model)


def test_a_drained_checkpoint_continues_as_after_a_drain(tmp_path):
    whole, first, second = build(), build(), build()
    for x, y in DATA[:9]:
        whole.step(x, y), first.step(x, y)
    whole.drain()
    assert first.save(tmp_path, drain=True) == tmp_path / "checkpoints/000000009"
    assert ls(tmp_path)[0].checkpoint.mode == "drained"
    second.load(tmp_path / "checkpoints/000000009")
    for x, y in DATA[9:]:
        assert whole.step(x, y).equal(second.step(x, y))
    assert same(second.drain(), whole.drain())


@pytest.mark.parametrize("K", [1, 2, 4])
def test_a_drained_checkpoint_loads_at_another_k(K, tmp_path):
    """One epoch of back-propagation at K=3, continued at K: the same as without a change."""

    def made(K: int) -> offbeat.Pipeline:
        pipe = build(K, method="bp", M=1)
        pipe.model[3][2].p = 0.0  # the random streams are those of stages
        return pipe

    whole, first, second = made(3), made(3), made(K)
    for x, y in DATA[:9]:
        whole.step(x, y), first.step(x, y)
    first.save(tmp_path, drain=True)
    second.load(tmp_path)
    for x, y in DATA[9:]:
        whole.step(x, y), second.step(x, y)
    assert same(second.drain(), whole.drain())


def test_batches_in_flight_are_lost_at_another_k_with_a_warning(tmp_path):
    first, second = build(3), build(2)
    for x, y in DATA[:9]:
        first.step(x, y)
    first.save(tmp_path)
    second.load(tmp_path)
    with pytest.warns(offbeat.NotRestored, match=r"4 batches that were in flight \(5 to 8\) are lost by the change"):
        second.step(*DATA[9])
    assert second.batches == 10


def test_the_model_has_the_loaded_weights_before_there_are_stages(tmp_path):
    first, second = build(), build()
    for x, y in DATA[:9]:
        first.step(x, y)
    first.save(tmp_path)
    second.load(tmp_path)
    assert same(second.model, first.gather())
    assert second.evaluate(DATA[:3]) == first.evaluate(DATA[:3])


def test_hybrid_needs_a_drain_or_notice(tmp_path):
    pipe, again = (build(method="adl:weights=hybrid") for _ in range(2))
    for x, y in DATA[:9]:
        pipe.step(x, y)
    with pytest.raises(CheckpointFailed, match=r"call keep\(\) 5 batches before saving, or drain"):
        pipe.save(tmp_path)
    pipe.keep()
    for x, y in DATA[9:14]:
        pipe.step(x, y)
    pipe.save(tmp_path)
    pipe.step(*DATA[14])
    pipe.save(tmp_path)  # it goes on keeping
    again.load(tmp_path)
    for x, y in DATA[15:]:
        assert pipe.step(x, y).equal(again.step(x, y))


def test_a_save_that_fails_leaves_the_pipeline_in_order(tmp_path):
    (tmp_path / "file").touch()
    pipe = build()
    with pytest.raises(UserError, match=r"save\(\) before there are stages"):
        pipe.save(tmp_path)
    pipe.step(*DATA[0])
    with pytest.raises(CheckpointFailed, match="cannot write"):
        pipe.save(tmp_path / "file")
    pipe.step(*DATA[1])
    with pytest.raises(UserError, match=r"has no valid checkpoint: give a folder that pipe.save"):
        build().load(tmp_path)


def test_the_newest_checkpoints_are_kept_and_a_damaged_one_is_passed_over(tmp_path):
    pipe = build()
    for x, y in DATA[:5]:
        pipe.step(x, y)
        pipe.save(tmp_path, keep=2)
    assert [listed.checkpoint.t for listed in ls(tmp_path)] == [4, 5]
    (tmp_path / "checkpoints/000000005/stage-01.json").write_text("{}")
    again = build()
    with pytest.warns(offbeat.NotRestored, match="checkpoint 000000005 is damaged and not used"):
        again.load(tmp_path)
    assert again.batches == 4


def test_a_checkpoint_exports_as_a_plain_model(tmp_path):
    pipe = build()
    for x, y in DATA[:5]:
        pipe.step(x, y)
    pipe.save(tmp_path)
    export(tmp_path, tmp_path / "model.safetensors")
    plain = network()
    plain.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert same(plain, pipe.gather())


def test_another_optimizer_is_refused_at_another_k(tmp_path):
    first = build(3)
    first.fit(DATA[:4], 1)
    first.save(tmp_path)
    second = build(2, optimizer=torch.optim.Adam, sample=DATA[0][0])
    with pytest.raises(UserError, match="of another optimizer than Adam, with momentum"):
        second.load(tmp_path)


def test_method_auto_resumes_with_the_m_that_it_chose(tmp_path, monkeypatch):
    from offbeat.pipeline import choice

    monkeypatch.setattr(choice, "batch_seconds", lambda *_, **__: lambda size: size)
    data = [(torch.cat([x] * 4), torch.cat([y] * 4)) for x, y in EIGHTS]  # with BatchNorm, 16 samples are the least
    first, second = (build(batch=32, method="auto", M=None) for _ in range(2))
    for x, y in data[:4]:
        first.step(x, y)
    first.save(tmp_path)
    monkeypatch.setattr(choice, "batch_seconds", lambda *_, **__: lambda size: 1)  # would choose M=1
    second.load(tmp_path)
    for x, y in data[4:]:
        assert first.step(x, y).equal(second.step(x, y))
    assert first.method.M == second.method.M > 1


def test_a_distributed_checkpoint_loads_into_a_plain_model_and_optimizer(tmp_path):
    pipe = build()
    for x, y in DATA[:9]:
        pipe.step(x, y)
    state = pipe.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, on a save without a process group
        dcp.save(copy.copy(state), checkpoint_id=tmp_path / "dcp")
        plain = network()
        loaded = {"model": plain.state_dict()}
        dcp.load(loaded, checkpoint_id=tmp_path / "dcp")
    assert same(plain, pipe.gather())
    optimizer = sgd(plain.parameters())
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    flat = dict(state["optimizer"])
    set_optimizer_state_dict(plain, optimizer, flat, options=StateDictOptions(flatten_optimizer_state_dict=True))
    assert {
        f"state.{name}.momentum_buffer"
        for name, p in plain.named_parameters()
        if "momentum_buffer" in optimizer.state[p]
    } <= set(flat)
    assert optimizer.param_groups[0]["lr"] == pipe.stages[1].optimization.optimizer.param_groups[0]["lr"]


def test_a_pipeline_is_a_context_manager():
    with build() as pipe:
        pipe.fit(DATA[:4], 1)
    assert pipe.batches == 4
    with pytest.raises(Stop), build() as pipe:
        raise Stop
