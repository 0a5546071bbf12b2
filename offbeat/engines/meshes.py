"""The processes of a pipeline as a torch DeviceMesh with the dimensions (replica, stage).

    rank of stage k of replica r          stage 1  stage 2        mesh["stage"]     the stages of this replica
        = r K + k-1           replica 0      0        1           mesh["replica"]   the replicas of this stage
                              replica 1      2        3

Its groups are for users and for tools of torch. The engine has groups of its own: it sums the windows of replicas in a
thread, and its links wait in others, so that in a group that is shared, the collectives of two processes could meet in
another order, or one could end the waits of the other (see Processes._fail_waits). They are of gloo, too, whatever the
backend of the mesh is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from offbeat.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DIMENSIONS = ("replica", "stage")


def make_mesh(device_type: str, K: int, replicas: int) -> DeviceMesh:
    """The mesh of all processes; collective, since torch makes the groups of all replicas and stages, in this order."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device_type, (replicas, K), mesh_dim_names=DIMENSIONS)


def size_of(mesh: Any, K: int | None, replicas: int) -> tuple[int | None, int]:
    """K and the number of replicas: those of the mesh, or as given where there is none; refuses what differs."""
    if mesh is None:
        return K, replicas
    made = "init_device_mesh('cpu', (R, K), mesh_dim_names=('replica', 'stage')), or (K,) and ('stage',)"
    if not hasattr(mesh, "mesh_dim_names"):
        raise UserError(f"mesh= is of type {type(mesh).__name__}: give a torch DeviceMesh, made by {made}")
    if mesh.mesh_dim_names not in (DIMENSIONS, DIMENSIONS[1:]):
        raise UserError(f"a mesh with dimensions {mesh.mesh_dim_names}: make it by {made}")
    if mesh.mesh.flatten().tolist() != list(range(mesh.mesh.numel())):
        raise UserError(f"a mesh of ranks {mesh.mesh.tolist()}: stage k of replica r has rank r K + k-1, use {made}")
    found_replicas, found_K = mesh.mesh.shape if mesh.mesh.ndim == 2 else (1, len(mesh.mesh))
    for name, given, found in (("K", K or found_K, found_K), ("replicas", replicas, found_replicas)):
        if given != found and (name, given) != ("replicas", 1):  # the default
            size = f"{found_replicas} replicas x {found_K} stages"
            raise UserError(f"{name}={given} with a mesh of {size}: leave out {name}, or make another mesh")
    return found_K, found_replicas
