"""The plan for any model: ``plan="auto"``, and a dict of patterns over it (``axo.plans.auto.patterns``).

Linear, Conv2d, Embedding and transformers' Conv1D become parallel layers. What lies between them is either

    split    where tracing proves it (``regions``): chains alternate normal and transposed, nothing is moved
    heads    attention of families that have a table (``families``): first projections normal, last transposed
    whole    everywhere else, the papers' easy mode: all features on every rank along x and y, rows over z and data. A
             layer cuts its part out of what comes in (its gradient is gathered), and gathers what goes out.

All other modules run unchanged on whole activations, their parameters replicated (``axo.nn.replicated``). So any model
gives the serial result; ``axo.plan_report(model)`` says what each layer has become and what the re-layout costs. Ranks
along x and y (with Tesseract, y) take the same rows, and compute the same loss from whole outputs.

Random numbers that modules draw from torch's default generator agree along x and y (``axo.nn.randomness``). A layer
whose sizes do not divide either way stays serial, with a warning. Refused over several data ranks: what would be of
each rank's own rows (``_of_own_rows``), such as batch normalisation. What cannot be known before is compared
(``agreement``).
"""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from axo.arrangement import Arrangement
from axo.errors import Refused
from axo.grid import Grid, Holders
from axo.nn import Dropout, Features
from axo.nn.layer import ParallelLayer
from axo.nn.linear import Linear
from axo.nn.randomness import SharedRandomness
from axo.nn.replicated import replicate
from axo.nn.shared_input import share_inputs
from axo.plans.auto.agreement import AgreementCheck
from axo.plans.auto.attention import NO_TABLE, split_attention
from axo.plans.auto.candidate import SplitCandidate, find_candidates, is_table_with_heads, tied
from axo.plans.auto.conv1d import Conv1D
from axo.plans.auto.decide import decide
from axo.plans.auto.experts import EveryExpert, SpreadBlock, WholeBalance, is_mixture
from axo.plans.auto.hugging_face import refuse_resizing
from axo.plans.auto.patterns import overrides
from axo.plans.auto.regions import find_regions
from axo.plans.auto.stacked_experts import StackedExperts, is_stack, unfit
from axo.plans.experts import holders, mixtures
from axo.plans.replace import Replacer, check_no_hooks
from axo.plans.report import LayerPlan, PlanReport

NOT_BY_HEADS = "attention not by heads: "


def apply(model: nn.Module, replacer: Replacer, plan: dict[str, str], *, chunked_loss: bool = False) -> nn.Module:
    """Replace the layers of ``model`` in place.

    Args:
        model: Any serial module, real or on the meta device.
        replacer: Makes the parallel layers.
        plan: Patterns over names; empty: none.
        chunked_loss: The loss is to be taken of ``model.lm_head``, which must become parallel.

    Raises:
        Refused: A pattern matches nothing or asks for what cannot be, or the model cannot be split exactly.
    """
    comms, grid, arrangement = replacer.comms, replacer.comms.grid, replacer.comms.arrangement
    names = {module: name for name, module in model.named_modules()}
    _check(model, grid, arrangement)
    candidates = find_candidates(model, grid, arrangement)
    asked = overrides(plan, [c.name for c in candidates], names.values())
    for candidate in candidates:
        candidate.override = asked.get(candidate.name)
    attentions, whole = split_attention(model, candidates, arrangement.inner, grid.size(arrangement.inner))
    inside, one_way = _decide_others(model, candidates, set(attentions), whole, grid, arrangement)
    heads = _keep_ties(model, candidates)
    listed = {candidate.module for candidate in candidates}
    report = PlanReport([_line(candidate, grid, arrangement) for candidate in candidates])
    for candidate in candidates:  # nothing has changed yet
        if candidate.decided.kind != "replicate":
            check_no_hooks(candidate.module, f"{type(candidate.module).__name__} {candidate.name!r}")
    stacks = {name: module for name, module in model.named_modules() if is_stack(module)}
    whole_stacks = {module: why for module in stacks.values() if (why := unfit(module, grid, arrangement.name))}
    owners = Counter(id(p) for module in model.modules() for p in module._parameters.values())
    for name, module in stacks.items():
        if module not in whole_stacks:
            check_no_hooks(module, f"{type(module).__name__} {name!r}")
            if any(owners[id(p)] > 1 for p in module.parameters()):
                raise Refused(f"parallelize: experts {name!r} share a weight with another module; give each its own")
    split = {candidate.module for candidate in candidates if candidate.decided.kind != "replicate"}
    if chunked_loss and model.lm_head not in split:
        raise Refused("parallelize: chunked_loss=True: the head stays serial on every rank; leave it out")
    spread = holders(model, comms)
    _check_spread(model, spread, candidates)
    if comms.experts.size > 1 and whole_stacks:
        raise Refused(f"parallelize: experts={comms.experts.size}: {next(iter(whole_stacks.values()))}")
    for candidate in candidates:
        if candidate.module in spread:
            candidate.decided.options["holders"] = spread[candidate.module]
        _replace(model, candidate, replacer, as_table=candidate in heads)
    for module, axis in inside.items():
        _replace_inside(model, names[module], axis, replacer)
    became = {module: model.get_submodule(names[module]) for module in (*[c.module for c in candidates], *inside)}
    for name, module in stacks.items():
        if module not in whole_stacks:
            (parent, _, child), reduce = name.rpartition("."), replacer.grad_reduce
            new = StackedExperts(module, comms=comms, grad_reduce=reduce, name=name)
            replacer.put(model.get_submodule(parent), child, new)
            report.layers.append(new.line(type(module).__name__))
            became[module] = new
    for module in list(model.modules()):  # a layer may be known under several names
        module._modules.update({name: became[child] for name, child in module._modules.items() if child in became})
    for head, table in heads.items():
        model.get_submodule(head.name).weight = model.get_submodule(table.name).weight
    for module, attention in attentions.items():
        attention.install(module, names[module], comms, replacer.grad_reduce)
    for name, module in list(model.named_modules()):
        if not isinstance(module, ParallelLayer):
            report.layers += _left_whole(name, module, whole_stacks.get(module)) if module not in listed else []
            replicate(module, comms, replacer.grad_reduce)
        if is_mixture(module) and spread:
            SpreadBlock(module, comms, replacer.grad_reduce)
        elif is_mixture(module) and arrangement.row_parts(grid) > 1:
            EveryExpert(module, gathers=grid.z > 1)
    body = getattr(model, getattr(model, "base_model_prefix", ""), None)
    if isinstance(body, nn.Module) and arrangement.row_parts(grid) > 1:
        body.register_forward_hook(WholeBalance(comms, replacer.grad_reduce), with_kwargs=True)
    SharedRandomness(comms, arrangement.rows).attach(model)
    if arrangement.row_parts(grid) > 1:
        AgreementCheck(comms, layers=not one_way).watch(model)
    share_inputs(model)
    if grid.world_size > 1:
        refuse_resizing(model)
    report.layers = [replace(one, backward_bytes=0) if _shares(model, one) else one for one in report]
    kept: Any = model
    kept._axo_plan_report = report
    if comms.world.rank == 0:  # all ranks would say the same
        _warn(report)
    return model


def _check(model: nn.Module, grid: Grid, arrangement: Arrangement) -> None:
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise Refused(
                f"parallelize: buffer {name!r} is on the meta device, and plan 'auto' does not know how to fill it;"
                " build the model with its buffers on a real device"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.layout != torch.strided and grid.world_size > 1:
            raise Refused(
                f"parallelize: {name!r} is {tensor.layout}, and ranks are given dense ones; make it dense, or a plain"
                " attribute that every rank builds alike"
            )
    if arrangement.row_parts(grid) == 1:
        return
    for name, parameter in model.named_parameters():
        if parameter.is_complex() and parameter.requires_grad:
            raise Refused(
                f"parallelize: {name!r} is {parameter.dtype}, whose gradients are not averaged over ranks; keep it as"
                " torch.view_as_real(...), a real parameter, and view it as complex in forward"
            )
    for name, module in model.named_modules():
        if reason := _of_own_rows(module):
            what, instead = reason
            axes = arrangement.rows[::-1]
            raise Refused(
                f"parallelize: {name!r} is a {type(module).__name__}, {what} of each rank's own rows"
                f" on {', '.join(f'{axis}={grid.size(axis)}' for axis in axes)}; {instead}"
                f" or a grid with {' and '.join(f'{axis}=1' for axis in axes)}"
            )


def _check_spread(model: nn.Module, spread: dict[nn.Module, Holders], candidates: list[SplitCandidate]) -> None:
    """Refuse experts on several ranks that are not made of linear layers, or whose block's code may not run twice."""
    split = {each.module for each in candidates if each.type == "linear" and each.decided.kind != "replicate"}
    for name, module in model.named_modules():
        if module in spread and module not in split and any(True for _ in module.parameters(recurse=False)):
            raise Refused(f"parallelize: {name!r} is of an expert that is to lie on some ranks, and cannot be split")
    for name, mixture, _ in mixtures(model) if spread else ():
        jitters = any(value for attribute, value in vars(mixture).items() if "jitter" in attribute)
        if jitters or not is_mixture(mixture):
            why = "draws random numbers" if is_mixture(mixture) else "is not one of transformers'"
            raise Refused(f"parallelize: {name!r}, a {type(mixture).__name__}, {why}: its experts stay on all ranks")


def _of_own_rows(module: nn.Module) -> tuple[str, str] | None:
    """What a module makes of all rows that it sees, and what to use instead; None: each row stands for itself."""
    if isinstance(module, _BatchNorm):
        return "whose statistics would be", "use GroupNorm or LayerNorm,"
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        return "whose running statistics would be", "use track_running_stats=False,"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        if module.max_norm is not None:
            return "whose max_norm would cut the weights", "leave max_norm out,"
        if module.scale_grad_by_freq and module.weight.requires_grad:
            return "whose scale_grad_by_freq would count the tokens", "leave scale_grad_by_freq out,"
        if module.sparse and module.weight.requires_grad:
            return "whose sparse=True gives sparse gradients", "leave sparse=True out,"
    return None


def _decide_others(
    model: nn.Module,
    candidates: list[SplitCandidate],
    closed: set[nn.Module],
    whole: dict[nn.Module, str],
    grid: Grid,
    arrangement: Arrangement,
) -> tuple[dict[nn.Module, str], bool]:
    """Decide the layers outside of attention that is split (``closed``); ``whole``: why other attention is not.

    Returns:
        The axis of each dropout and group norm that stays split; whether the model has one way (``regions``).
    """
    while True:
        free = [candidate for candidate in candidates if candidate.decision is None]
        traced = find_regions(model, free, closed)
        read = [candidate for candidate in free if candidate.module in traced.read]
        if not read:
            break
        for candidate in read:
            candidate.keep("another module reads its weight itself")
    inside = decide(free, traced.regions, grid, arrangement)
    for candidate in free:
        decision = candidate.decided
        decision.why = decision.why or f"whole: {traced.whole[candidate.module]}"
        if candidate.module in whole and not (decision.split_in or decision.split_out):
            decision.why = NOT_BY_HEADS + whole[candidate.module]
    return inside, traced.one_way


def _keep_ties(model: nn.Module, candidates: list[SplitCandidate]) -> dict[SplitCandidate, SplitCandidate]:
    """Heads that share an embedding's weight, with it; where the two are not split alike, both stay serial.

    Raises:
        Refused: They are not split alike, and activations beside them are split.
    """
    tables = dict[SplitCandidate, SplitCandidate]()
    for group in tied(model, candidates):
        if not is_table_with_heads(group):
            continue
        table, *heads = sorted(filter(None, group), key=lambda layer: layer.type != "embedding")
        decisions = [layer.decided for layer in (table, *heads)]
        kinds = {decision.kind for decision in decisions}
        if kinds == {"normal"}:
            tables |= dict.fromkeys(heads, table)
        elif kinds != {"replicate"}:
            names = [layer.name for layer in candidates if layer in (table, *heads)]
            if any(decision.split_in or decision.split_out for decision in decisions):
                raise Refused(
                    f"parallelize: {', '.join(names)} share one weight and cannot be split alike; give"
                    " all of them kind 'normal' or 'replicate' in a plan of patterns, or untie them"
                )
            for layer in (table, *heads):
                layer.keep("shares its weight with a layer that is split otherwise")
    return tables


def _replace(model: nn.Module, candidate: SplitCandidate, replacer: Replacer, *, as_table: bool) -> None:
    decision, name = candidate.decided, candidate.name
    if decision.kind == "replicate":
        return
    if not name:
        raise Refused(
            f"parallelize: the model is itself a {type(model).__name__}; put it into a module, or use"
            f" axo.nn.{type(model).__name__}"
        )
    where, _, child = name.rpartition(".")
    parent, transposed = model.get_submodule(where), decision.kind == "transposed"
    sides: dict[str, Any] = {"scatter_input": not decision.split_in, "gather_output": not decision.split_out}
    if candidate.type == "embedding":
        replacer.embedding(parent, child, name, gather_output=not decision.split_out)
    elif candidate.type == "conv2d":
        replacer.conv2d(parent, child, name, transposed=transposed, **sides)
    elif candidate.type == "linear":
        options = {"uneven_out": not decision.split_out, "as_table": as_table, **sides, **decision.options}
        replacer.linear(parent, child, name, transposed=transposed, **options)
    else:
        features = Features(**sides, **decision.options)
        new = Conv1D(
            candidate.module,
            comms=replacer.comms,
            transposed=transposed,
            grad_reduce=replacer.grad_reduce,
            features=features,
            name=name,
        )
        replacer.put(parent, child, new)


def _replace_inside(model: nn.Module, name: str, axis: str, replacer: Replacer) -> None:
    """Put in a dropout or a group norm of activations that stay split over ``axis``."""
    where, _, child = name.rpartition(".")
    parent, old = model.get_submodule(where), cast(Any, model.get_submodule(name))
    if isinstance(old, nn.GroupNorm):
        replacer.group_norm(parent, child, name, axis=axis)
        return
    new = Dropout(old.p, old.inplace, comms=replacer.comms, split=(axis, *replacer.comms.arrangement.rows))
    setattr(parent, child, new.train(old.training))


def _line(candidate: SplitCandidate, grid: Grid, arrangement: Arrangement) -> LayerPlan:
    """What one row costs in all-gathers: this rank's part, where the axis has more than one."""
    module, choice = candidate.module, candidate.decided
    in_axis, out_axis = candidate.axes(choice.kind, arrangement)
    forward = backward = 0
    if choice.kind != "replicate":
        if not choice.split_out and grid.size(out_axis) > 1:
            forward = -(-candidate.out // grid.size(out_axis)) * module.weight.element_size()
        if candidate.into and not choice.split_in and grid.size(in_axis) > 1:
            backward = -(-candidate.into // grid.size(in_axis)) * module.weight.element_size()
    kind = type(module).__name__
    return LayerPlan(
        candidate.name, kind, choice.kind, choice.split_in, choice.split_out, forward, backward, choice.why
    )


def _left_whole(name: str, module: nn.Module, reason: str | None) -> list[LayerPlan]:
    """The row of a module of no known kind whose own weights are large, such as experts in one that stay so."""
    for own, weight in module.named_parameters(recurse=False):
        why = reason or f"{own} has {weight.ndim} dimensions: such weights stay whole on every rank"
        if isinstance(module, nn.Linear):
            why = "its class is not torch.nn.Linear itself"
        elif weight.ndim < 3 or min(weight.shape) == 1:
            continue
        return [LayerPlan(name, type(module).__name__, "replicate", False, False, 0, 0, why)]
    return []


def _shares(model: nn.Module, line: LayerPlan) -> bool:
    """Whether another layer, which comes first, gathers the gradient of its input too."""
    layer = model.get_submodule(line.name)
    return isinstance(layer, Linear) and not layer.sums_input_grad


def _warn(report: PlanReport) -> None:
    serial = [line for line in report if line.kind == "replicate" and not line.why.startswith("plan ")]
    lines = [f"{line.name}: {line.why}" for line in serial]
    if lines:
        warnings.warn(f"parallelize: {len(lines)} layers stay serial on every rank: {_some(lines)}", stacklevel=4)
    reasons = [line.why for line in report if line.why.startswith(NOT_BY_HEADS) and NO_TABLE not in line.why]
    if reasons:
        whole = _some([why.removeprefix(NOT_BY_HEADS) for why in dict.fromkeys(reasons)])
        warnings.warn(f"parallelize: attention is not split by heads: {whole}", stacklevel=4)


def _some(lines: list[str]) -> str:
    return "; ".join(lines[:4]) + (f" (and {len(lines) - 4} more)" if len(lines) > 4 else "")
