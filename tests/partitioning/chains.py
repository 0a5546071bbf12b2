"""Run a model whole and as a chain of stages, to compare them bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils import _pytree as pytree

from offbeat.core.links import Message
from offbeat.core.links.wire import pack, unpack


def cross(content):
    """What arrives at the next stage: as any link packs it, leaves that require gradients where the sent tensors do."""
    return unpack(pack(Message(0, content))).content


def tensors(content):
    return [leaf for leaf in pytree.tree_leaves(content) if isinstance(leaf, Tensor)]


def result(model, outputs, x, gradients):
    """Output, gradients by name (the input's too), and buffers, for comparison."""
    named = {f"gradient of {name}": gradient for name, gradient in gradients.items() if gradient is not None}
    named |= {f"output {n}": tensor.detach() for n, tensor in enumerate(tensors(outputs))}
    return named | {name: buffer.clone() for name, buffer in model.named_buffers()}


def seeds(outputs):
    """Gradients of some loss with respect to the outputs."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in tensors(outputs)]


def call(model, x):
    """A tuple is several arguments, a dict keyword arguments."""
    if isinstance(x, dict):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)


def given(x, requires_grad):
    """A copy of a batch, whose floating-point tensors require gradients if wanted."""
    return pytree.tree_map_only(
        Tensor, lambda t: t.detach().clone().requires_grad_(requires_grad and t.is_floating_point()), x
    )


def wholly(model, x, requires_grad=True):
    """The unsplit model; requires_grad: also gradients of the batch."""
    torch.manual_seed(3)
    x = given(x, requires_grad)
    inputs = [t for t in tensors(x) if t.requires_grad]
    outputs = call(model, x)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    wanted = [*parameters.values(), *inputs]
    roots, incoming = zip(*((root, seed) for root, seed in zip(tensors(outputs), seeds(outputs)) if root.requires_grad))
    found = torch.autograd.grad(roots, wanted, incoming, allow_unused=True)
    names = [*parameters, *(f"input {n}" for n in range(len(inputs)))]
    return result(model, outputs, x, dict(zip(names, found)))


def in_stages(model, parts, x, snapshots=False, requires_grad=True):
    """The chain, with nothing between its stages but packed messages there and gradients back.

    Gradients go back by hand, with the strides that they have in the unsplit model: a link makes one with gaps
    contiguous (of a slice, say), and some sums then run in another order.
    """
    torch.manual_seed(3)
    x = given(x, requires_grad)
    tape, value = [], x
    for k, part in enumerate(parts):
        value = cross(value) if k else x
        leaves = [t for t in tensors(value) if t.requires_grad]
        parameters = {name: p for name, p in part.named_parameters() if p.requires_grad}
        if snapshots:
            parameters = {name: p.detach().clone().requires_grad_() for name, p in parameters.items()}
            outputs = functional_call(part, parameters, (value,))
        else:
            outputs = part(value)
        tape.append((value, leaves, parameters, outputs))
        value = outputs
    incoming = seeds(value)
    gradients = {}
    for value, leaves, parameters, outputs in reversed(tape):
        pairs = [(root, g) for root, g in zip(tensors(outputs), incoming) if g is not None and root.requires_grad]
        found = [None] * (len(parameters) + len(leaves))
        if pairs and found:
            roots, arrived = zip(*pairs)
            found = torch.autograd.grad(roots, [*parameters.values(), *leaves], arrived, allow_unused=True)
        gradients |= dict(zip(parameters, found))
        back = iter(found[len(parameters) :])
        incoming = [next(back) if t.requires_grad else None for t in tensors(value)]
    gradients |= {f"input {n}": g for n, g in enumerate(g for g in incoming if g is not None)}
    return result(model, outputs=tape[-1][3], x=x, gradients=gradients)


def same(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), f"{name} differs by {(tensor - other[name]).abs().max()}"
