"""Refuse steps that cannot be right, before anything is changed: of the optimizer, and the first one of the model.

torch's ``step`` passes over parameters without gradients in silence. Two cases are mistakes, and refused: no parameter
of the model has a gradient although the model ran forward in training; and gradients still wait for a backward outside
of ``axo.no_sync``. The check is called before each step, or after its closure, for as long as its model lives.
After a step no weight that was gathered before is used again, since a change may not show in its version
(``p.data.add_(...)``).

The state that an optimizer has loaded must be that of this rank's shards (``optimizer_state``), and its update must be
one of single elements where tensors are split, which is tried (``update_trial``). Every optimizer of the process is
asked, since a model may be made by hand. One that also holds parameters which are not the grid's gets a warning: Axo
does not reduce their gradients.

An optimizer that was made before ``axo.parallelize`` holds parameters that the model no longer has: its steps would
train nothing, and are refused.

A model made by a plan takes the same input on all ranks along x and y (with Tesseract, y). Rows that differ there would
be mixed in silence, so inputs are compared, in the first pass with gradients and the first one without, or
(``AXO_CHECK=1``) in all.

A compiled model is refused unless ``keep_out_of_graphs`` was called: to trace its communication takes minutes a layer.
So is one inside of torch's DistributedDataParallel, which broadcasts rank 0's parameters.
"""

from __future__ import annotations

import hashlib
import math
import warnings
import weakref
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from axo.comm.connect import Communicators
from axo.comm.counting import observers as counting
from axo.errors import Refused
from axo.overlap import optimizer_state
from axo.overlap.step_hooks import Arguments, after_steps, before_steps, closure_of, with_closure
from axo.overlap.update_trial import LIMIT, try_update
from axo.placement import placement_of

if TYPE_CHECKING:
    from axo.overlap.engine import Engine


def watch(engine: Engine) -> None:
    """Check each optimizer step on parameters of the model of ``engine`` against what the engine has seen."""
    before_steps(engine, _check_gradients)
    if engine.comms.data_ranks > 1:
        before_steps(engine, partial(_warn_of_others, weakref.WeakSet()))
    after_steps(engine, lambda engine, *_: engine.gathers.outdate())


def _check_gradients(engine: Engine, optimizer: Optimizer, arguments: Arguments) -> Arguments | None:
    closure = closure_of(arguments)
    if closure is None:
        _check_those_there(engine, optimizer)
        return None
    engine.settle()

    def checked() -> object:
        loss = closure()
        _check_those_there(engine, optimizer)
        return loss

    return with_closure(arguments, checked)


def _check_those_there(engine: Engine, optimizer: Optimizer) -> None:
    engine.settle()
    engine.gradients.forget_zeroed()
    if not (engine.gradients.deferred or engine.awaits_backward):
        return
    mine = {id(parameter) for parameter in engine.parameters()}  # those of a meta model are made anew
    stepped = [p for group in optimizer.param_groups for p in group["params"] if id(p) in mine]
    if any(id(p) in engine.gradients.deferred for p in stepped):
        raise RuntimeError(
            "step(): gradients of micro-batches inside axo.no_sync wait to be reduced; run the last backward of the"
            " step outside of it"
        )
    if stepped and all(p.grad is None for p in stepped):
        raise RuntimeError(
            "step() without backward: the model has run forward, and none of its parameters has a gradient; call"
            " backward on the loss first"
        )


def _warn_of_others(asked: weakref.WeakSet[Optimizer], engine: Engine, optimizer: Optimizer, _: Arguments) -> None:
    if optimizer in asked:
        return
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if all(p.grad is None for p in held):  # a closure makes the first ones
        return
    asked.add(optimizer)
    others = [tuple(p.shape) for p in held if p.grad is not None and placement_of(p) is None]
    if others and not {id(p) for p in held}.isdisjoint(id(p) for p in engine.parameters()):
        warnings.warn(
            f"axo: step(): {len(others)} parameters of this optimizer, of shape {others[0]}, are not the grid's."
            " Axo does not reduce their gradients over z and data, so they drift apart: put them into the model before"
            " axo.parallelize, or reduce their gradients before the step",
            stacklevel=2,
        )


def check_update(optimizer: Optimizer, where: str) -> None:
    """Check that an optimizer may step on the parts of parameters that this rank has.

    One that knows of the other ranks' parts says so: its class has ``takes_shards = True``.

    Raises:
        Refused: Its update of a part of a tensor is not that part of its update of the whole tensor.
    """
    if getattr(optimizer, "takes_shards", False) or not optimizer_state.shards_of(optimizer):
        return
    name, found = type(optimizer).__name__, try_update(optimizer)
    if found.share > LIMIT:
        how = found.reason if math.isinf(found.share) and found.reason else f"is off by {min(found.share, 9.99):.1%}"
        raise Refused(
            f"{where}: {name} does not update element by element (on a half of a small tensor it {how}), and its"
            " parameters are split over ranks; use an optimizer such as AdamW or SGD, or a grid with data ranks only"
            " and zero=0; one that knows of the other ranks' parts needs takes_shards = True on its class"
        )
    if found.reason:
        warnings.warn(
            f"axo: {where}: {name} could not be tried on a part of a small tensor ({found.reason}). Its parameters are"
            " split over ranks, so its steps are right only if it updates element by element",
            stacklevel=2,
        )


def _check_state(tried: Tried, owner: object, optimizer: Optimizer, arguments: Arguments) -> None:
    if tried.get(optimizer) != len(optimizer.param_groups):
        check_update(optimizer, "step()")
        tried[optimizer] = len(optimizer.param_groups)
    optimizer_state.check(optimizer)
    optimizer_state.mark(optimizer)


Tried = weakref.WeakKeyDictionary[Optimizer, int]  # optimizers, and how many groups they had then
before_steps(_check_state, partial(_check_state, Tried()))  # first, and for good


Replaced = list[tuple[str, "weakref.ref[nn.Parameter]"]]


def parameters_of(model: nn.Module) -> Replaced:
    """The parameters that ``model`` has now, by name; whoever asks does not keep them alive."""
    return [(name, weakref.ref(parameter)) for name, parameter in model.named_parameters()]


def watch_replaced(model: nn.Module, before: Replaced) -> None:
    """Refuse steps of optimizers that hold parameters of ``before`` which ``model`` no longer has."""
    kept = {id(parameter) for parameter in model.parameters()}
    gone = [(name, each) for name, each in before if each() is not None and id(each()) not in kept]
    if not gone:
        return

    def check(model: nn.Module, optimizer: Optimizer, arguments: Arguments) -> None:
        names = {id(each()): name for name, each in gone if each() is not None}
        held = [p for group in optimizer.param_groups for p in group["params"]] if names else []
        lost = [names[id(p)] for p in held if id(p) in names]
        if lost:
            raise RuntimeError(
                f"step(): this optimizer was made before axo.parallelize and holds {len(lost)} parameters that the"
                f" model no longer has ({lost[0]!r} among them), so it would train nothing; make the optimizer after"
                " axo.parallelize, from model.parameters()"
            )

    before_steps(model, check)


def refuse_wrapped(engine: Engine) -> None:
    """Refuse a forward pass that a compiler traces, or calls between two graphs, and one of DistributedDataParallel.

    One that only calls the model, without its parameters (a frozen teacher), is right.

    Raises:
        Refused: It is one. Who has called ``keep_out_of_graphs`` runs without a compiler here.
    """
    around = DistributedDataParallel._get_active_ddp_module()
    if around is not None and not {id(p) for p in around.parameters()}.isdisjoint(map(id, engine.parameters())):
        raise Refused(
            "DistributedDataParallel: it broadcasts rank 0's parameters and reduces gradients a second time; make the"
            " model anew and train what axo.parallelize returns as it is; Axo reduces gradients over z and data itself"
        )
    if torch.compiler.is_compiling() or callable(get_eval_frame_callback()):
        raise Refused(
            "torch.compile: it would trace this model's communication; call"
            " axo.integrations.fabric.compile.keep_out_of_graphs(model) before torch.compile(model), and"
            " again where the model was attached since"
        )


def check_same_inputs(comms: Communicators, tensors: Iterable[torch.Tensor]) -> None:
    """Compare a model's inputs over the axes that do not split rows.

    Raises:
        ValueError: They differ; on every rank of the axis.
    """
    digest = hashlib.blake2b(digest_size=7)
    for tensor in tensors:
        if tensor.layout == torch.strided and not tensor.is_meta:
            digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().data)
    mine = torch.tensor([int.from_bytes(digest.digest(), "little")], dtype=torch.int64, device=comms.device)
    axes = [axis for axis in ("x", "y") if axis not in comms.arrangement.rows]
    for axis in axes:
        if comms.grid.size(axis) == 1:
            continue
        with counting.paused():
            found = comms.axis(axis).all_gather(mine).tolist()
        differ = [rank for rank, each in enumerate(found) if each != found[0]]
        if differ:
            raise ValueError(
                f"forward: the input on {axis}={', '.join(map(str, differ))} differs from that on {axis}=0; ranks along"
                f" {' and '.join(axes)} work on the same rows (only {' and '.join(reversed(comms.arrangement.rows))}"
                " split the batch): give the sampler comms.data_rank of comms.data_ranks, or cut a batch by"
                " axo.shard_batch(batch, comms)"
            )
