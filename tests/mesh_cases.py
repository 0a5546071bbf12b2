"""The torch DeviceMesh of a pipeline, under torchrun with four processes: tests/engines/test_mesh.py starts it."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases import fingerprint
from replica_cases import images, layers, sgd
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import offbeat
from offbeat.errors import UserError


def pipeline(**options: Any) -> offbeat.Pipeline:
    torch.manual_seed(0)
    options = {"method": "adl", "M": 2, "loss": nn.functional.cross_entropy, "optimizer": sgd, "cuts": [1]} | options
    return offbeat.Pipeline(layers(), **options)


def weights(model: nn.Module) -> str:
    return str(fingerprint({name: parameter.detach() for name, parameter in model.named_parameters()}))


def train(pipe: offbeat.Pipeline) -> str:
    batches = images(8)
    for t in range(4):
        pipe.step(*batches[2 * t + pipe.replica])
        if pipe.mesh["replica"].size() == 2:  # a collective of the user's, while a sum may be under way
            total = torch.ones(1)
            dist.all_reduce(total, group=pipe.mesh["replica"].get_group())
            assert total == 2
    return weights(pipe.drain())


def check_own() -> str:
    """A mesh that the pipeline makes."""
    with pipeline(K=2, replicas=2) as pipe:
        mesh, rank = pipe.mesh, dist.get_rank()
        assert mesh is pipe.mesh
        assert mesh.mesh_dim_names == ("replica", "stage")
        assert mesh.mesh.tolist() == [[0, 1], [2, 3]]
        assert list(mesh.get_coordinate()) == [pipe.replica, next(iter(pipe.stages)) - 1]
        assert dist.get_process_group_ranks(mesh["stage"].get_group()) == [rank - rank % 2, rank - rank % 2 + 1]
        assert dist.get_process_group_ranks(mesh["replica"].get_group()) == [rank % 2, rank % 2 + 2]
        first = train(pipe)
    assert dist.is_initialized()
    return first


def check_given(out: str) -> str:
    """A mesh of the user's, which gives K and replicas; it is used after the pipeline, too."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "stage"))
    with pipeline(mesh=mesh) as pipe:
        assert (pipe.K, pipe.replicas, pipe.mesh) == (2, 2, mesh)
        found = train(pipe)
        # replica 0 saves: a torch tool with one group of the mesh
        if pipe.replica == 0:
            dcp.save(pipe.state_dict(), checkpoint_id=out, process_group=mesh["stage"].get_group())
    dist.barrier(group=mesh["stage"].get_group())
    dist.barrier()
    plain = layers()
    whole = {"model": plain.state_dict()}
    dcp.load(whole, checkpoint_id=out)
    plain.load_state_dict(whole["model"])
    assert weights(plain) == found
    return found


def check_refusals() -> None:
    named = ("replica", "stage")
    wide, one = init_device_mesh("cpu", (2, 2), mesh_dim_names=named), init_device_mesh("cpu", (4,))
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    crossed = torch.distributed.device_mesh.DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=named)
    for options, words in (
        ({"mesh": wide, "K": 3}, ("K=3 with a mesh of 2 replicas x 2 stages: leave out K",)),
        ({"mesh": wide, "replicas": 3}, ("replicas=3 with a mesh of 2 replicas x 2 stages: leave out replicas",)),
        ({"mesh": wide, "engine": "simulate"}, ("engine='simulate' with mesh=, which is one of processes: leave out",)),
        (
            {"mesh": other},
            ("a mesh with dimensions ('dp', 'pp'): make it by init_device_mesh('cpu', (R, K), mesh_dim_",),
        ),
        ({"mesh": one}, ("a mesh with dimensions None: make it by init_device_mesh",)),
        ({"mesh": wide["stage"]}, ("2 stages but 4 processes", "a mesh of ranks [2, 3]: stage k")),
        ({"mesh": crossed}, ("a mesh of ranks [[0, 2], [1, 3]]: stage k of replica r has rank r K + k-1",)),
    ):
        with pytest.raises(UserError) as refused:
            pipeline(**options)
        assert any(each in str(refused.value) for each in words), refused.value


def main(out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    check_refusals()
    found = check_own()
    assert check_given(f"{out}/saved") == found
    if dist.get_rank() == 0:
        with open(f"{out}/weights", "w") as file:
            file.write(found)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(*sys.argv[1:])
