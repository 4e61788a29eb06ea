"""split: this rank's stages of a model that has been parallelized. Names of parameters stay those of the whole model.

    with torch.device("meta"):
        model = GPT(config)
    axo.parallelize(model, comms)                               # on the grid of each stage; nothing is held yet
    (module,) = axo.pipeline.split(model, comms, cuts="even")
    axo.init_weights(model, model._init_weights)                # the values of the whole model, of this stage's layers

``model`` becomes this rank's part: where another rank has a layer stands ``axo.nn.placeholder.Placeholder``, without
parameters. Optimizer, checkpoints, clipping and first values take ``model`` as ever. With one stage a rank, the stage
is ``model`` itself; with several, each is a view of it that has its own blocks only.

The first and the last stage both hold a table that serves embedding and head. A schedule that ``axo.pipeline.schedule``
has made adds up its two gradients at the end of each step; norms and checkpoints have it once.

Not here: which families are known (``axo.pipeline.families``).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from axo.comm.communicator import Communicator
from axo.comm.connect import Communicators
from axo.errors import Refused
from axo.nn.init import tied_parameters
from axo.nn.layer import ParallelLayer
from axo.nn.placeholder import Placeholder, renamed, set_shared
from axo.optim.zero import gradient_of, set_gradient, zero_gradient
from axo.overlap.model import detach, engines
from axo.perf import hugging_face, readers
from axo.perf.cut import bounds_of, planned
from axo.perf.pipeline_schedule import LOOP, V, rank_of, stages_of
from axo.perf.workload import Workload
from axo.pipeline.families import Family, family_of

PART = "_axo_part"  # where a model says what part of a pipeline it is


@dataclass(frozen=True)
class PipelinePart:
    """What part of a pipeline a module is.

    Attributes:
        stages: All stages of the model.
        index: Which of them the module is; of a rank's whole part with several stages, the first.
        features: Features of the residual stream on this rank: its last dim.
        token_ranks: Ranks that the tokens of the residual stream are split over.
        tied: Ranks that hold one tensor together (``axo.nn.placeholder.renamed``), this one among them; None: none.
    """

    stages: int
    index: int
    features: int
    token_ranks: int
    tied: Communicator | None = None


def part_of(model: nn.Module) -> PipelinePart | None:
    """What part of a pipeline ``model`` is; None: it is whole."""
    return model.__dict__.get(PART)


def workload_of(model: nn.Module) -> Workload:
    """What the planner knows of a model of a known family."""
    config: Any = model.config
    if hasattr(config, "to_dict"):
        return hugging_face.read(config.to_dict())
    return readers.from_litgpt(vars(config), seq_length=getattr(model, "max_seq_length", None))


def split(
    model: nn.Module,
    comms: Communicators,
    cuts: str | Sequence[int] = "even",
    *,
    stages_per_rank: int = 1,
    order: str = LOOP,
    views: bool = False,
) -> list[nn.Module]:
    """Keep this rank's stages of ``model``, in place, and return them, each a module. Every rank calls it.

    Args:
        model: A parallelized model of a family that is known, best on the meta device: of a real model each rank holds
            its shards of all layers until this call.
        comms: What ``axo.connect(grid, pipeline=...)`` returned, and ``axo.parallelize`` was given.
        cuts: ``"even"``: blocks as evenly as they go; ``"planner"``: so that the busiest rank has the least flops, the
            head's among them (``axo.perf.cut``); or the first block of each stage but the first, such as [3, 7].
        stages_per_rank: Stages on each rank; the model has ``comms.stages`` times as many.
        order: ``"loop"``: stage s is on pipeline rank ``s % comms.stages``; ``"v"``: two stages a rank, there and back.
        views: Return views where a rank has one stage too, and leave the ``forward`` of ``model`` to the caller.

    Raises:
        ValueError: The cuts do not give each stage a block, or an option is wrong. The same on every rank.
        Refused: The model is not of a known family, or shares a weight across stages other than embedding and head.
    """
    if stages_per_rank < 1 or order not in (LOOP, V) or (order == V and stages_per_rank != 2):
        raise ValueError(
            f"pipeline: stages_per_rank={stages_per_rank} with order={order!r} is not known; use 'loop' with 1 or more,"
            " or 'v' with 2"
        )
    if part_of(model) is not None:
        raise ValueError("pipeline: the model has been split already; build it again")
    if not any(isinstance(module, ParallelLayer) and module.comms is comms for module in model.modules()):
        raise ValueError("pipeline: the model holds no layer of this grid; call axo.parallelize(model, comms) first")
    family = family_of(model)
    if comms.context.size > 1 and hasattr(getattr(model, "config", None), "model_type"):
        raise Refused("pipeline: a model of transformers in a context has no stages; leave one of the two out")
    stages = comms.stages * stages_per_rank
    blocks: Any = model.get_submodule(family.blocks)
    if cuts == "planner":
        cuts = planned(workload_of(model), comms.stages, stages, order)[1:-1]
    bounds = bounds_of(len(blocks), stages, cuts)
    home = _homes(family, bounds)
    mine = stages_of(comms.stage, stages, comms.stages, order)
    part = replace(_tie(model, family, comms, stages, order, home), stages=stages, index=mine[0])
    for name, stage in home.items():
        if stage not in mine:
            _put(model, name, Placeholder(model.get_submodule(name).to("meta"), _gives(family, name)))
    setattr(model, PART, part)
    views = views or len(mine) > 1
    attach_alike = detach(model) if views else None
    modules: list[nn.Module] = []
    for index in mine:
        module = model
        if views:
            module = view(model)
            for name, stage in home.items():
                if stage in mine and stage != index:
                    _put(module, name, Placeholder(None, _gives(family, name)), in_view=True)
        setattr(module, PART, replace(part, index=index))
        modules.append(module)
    for kept in model.modules():
        if isinstance(kept, ParallelLayer):
            kept._tag()
    for index, module in zip(mine, modules, strict=True):
        if attach_alike is not None:
            attach_alike(module)
        family.finish(module, index == 0, index == stages - 1)
        for engine in engines(module) if index else ():
            engine.compares_inputs = set()  # activations, split over y
    return modules


def _homes(family: Family, bounds: list[int]) -> dict[str, int]:
    """The stage of each module that one stage alone holds."""
    last = len(bounds) - 2
    homes = dict.fromkeys(family.before, 0) | dict.fromkeys(family.after, last)
    for stage, (low, high) in enumerate(itertools.pairwise(bounds)):
        homes |= {f"{family.blocks}.{block}": stage for block in range(low, high)}
    return homes


def _gives(family: Family, name: str) -> str:
    return {**family.before, **family.after}.get(name, family.block_gives)


def _stage_of(name: str, home: dict[str, int]) -> int | None:
    """The stage that holds what is called ``name``; None: every stage does."""
    return next((stage for module, stage in home.items() if name == module or name.startswith(f"{module}.")), None)


def _tie(
    model: nn.Module, family: Family, comms: Communicators, stages: int, order: str, home: dict[str, int]
) -> PipelinePart:
    """Note which weight two stages use; who holds it, and what the residual stream is like."""
    names = {module: name for name, module in model.named_modules()}
    last = stages - 1
    names_in_whole: dict[str, str] = {}
    shared: dict[str, str] = {}
    tied: Communicator | None = None
    listed = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for owners in tied_parameters(model).values():
        called = sorted((f"{names[module]}.{child}" for module, child in owners), key=listed.index)
        held = {_stage_of(name, home) for name in called}
        if len(held) == 1:
            continue
        if held != {0, last}:
            raise Refused(
                f"pipeline: {', '.join(called)} share one weight and lie on stages {sorted(map(str, held))}; only the"
                " first and the last stage can share one (embedding and head): untie them, or cut elsewhere"
            )
        ranks = sorted({rank_of(stage, stages, comms.stages, order) for stage in (0, last)})
        if len(ranks) < 2:
            continue  # one rank has both: the parameter is the same there
        tied = comms.among(ranks, "tied")
        end = {ranks[0]: 0, ranks[1]: last}.get(comms.stage)
        own = [name for name in called if _stage_of(name, home) == end]
        names_in_whole |= dict.fromkeys(own, called[0])
        shared |= {name: own[0] for name in called if own and name not in own}
        if comms.stage == ranks[1]:
            for module, child in owners:
                if isinstance(module, ParallelLayer):
                    module.placements[child] = replace(module.placements[child], counted=False)
    set_shared(model, names_in_whole, shared)
    if not family.table:
        config: Any = model.config
        return PipelinePart(stages, 0, config.hidden_size, 1, tied)
    table: Any = model.get_submodule(family.table)
    grid = comms.grid
    width = table.embedding_dim // (1 if getattr(table, "gather_output", True) else grid.y)
    tokens = grid.x if getattr(table, "scatters_tokens", False) else 1
    return PipelinePart(stages, 0, width, tokens, tied)


def _put(model: nn.Module, name: str, module: nn.Module, *, in_view: bool = False) -> None:
    """Put ``module`` in the place called ``name``; in a view the modules on the way are made its own."""
    *way, child = name.split(".")
    parent = model
    for step in way:
        below = parent.get_submodule(step)
        if in_view and not below.__dict__.get("_axo_view"):
            below = parent._modules[step] = view(below)
        parent = below
    parent._modules[child] = module


def view(module: nn.Module) -> Any:
    """The same module as another object with its own table of children; tensors and hooks are the same."""
    other = object.__new__(type(module))
    other.__dict__.update(module.__dict__)
    other.__dict__["_modules"] = dict(module._modules)
    other.__dict__["_axo_view"] = True
    for name, value in module.__dict__.items():
        if name.endswith("hooks") or name.startswith("_forward_"):
            other.__dict__[name] = type(value)(value) if isinstance(value, dict) else value
    return other


@contextmanager
def tied_gradients(modules: Sequence[nn.Module]) -> Iterator[None]:
    """A step of a schedule: at its end the gradients that it has given a table which two stages hold are added up.

    What ``.grad`` held before is put aside meanwhile: it has been added up already. Both stages enter it.
    """
    pairs: list[tuple[torch.Tensor, Communicator]] = []
    for module in modules:
        part = part_of(module)
        if part is None or part.tied is None:
            continue
        named = dict(module.named_parameters(remove_duplicate=False))
        pairs += [(named[name], part.tied) for name in sorted(renamed(module).keys() & named.keys())]
    # A gradient on the lower tier has one place, which the step's own will take.
    before = [(p, gradient_of(p)) for p, _ in pairs]
    kept = [grad.clone() if grad is not None and hasattr(p, "home") else grad for p, grad in before]
    for parameter, _ in pairs:
        parameter.grad = None
    try:
        yield
        with torch.no_grad():
            for parameter, tied in pairs:
                if parameter.grad is None and parameter.requires_grad:
                    set_gradient(parameter, zero_gradient(parameter))
                if parameter.grad is not None:
                    whole = tied.all_reduce(parameter.grad.to(tied.device))
                    if whole.device != parameter.grad.device:  # that of a weight on the host
                        parameter.grad.copy_(whole)
    finally:
        for (parameter, _), grad in zip(pairs, kept, strict=True):
            if grad is not None:
                set_gradient(parameter, grad if parameter.grad is None else grad.add_(parameter.grad))
