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
from dataclasses import dataclass, field, replace
from typing import Any, cast

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from axo.arrangement import Arrangement
from axo.errors import Refused
from axo.grid import Grid
from axo.nn import Dropout, Features
from axo.nn.init import tied_parameters
from axo.nn.layer import ParallelLayer
from axo.nn.linear import Linear
from axo.nn.randomness import SharedRandomness
from axo.nn.replicated import replicate
from axo.nn.shared_input import share_inputs
from axo.plans.auto.agreement import AgreementCheck
from axo.plans.auto.attention import Attention, Splitter
from axo.plans.auto.conv1d import Conv1D, is_conv1d
from axo.plans.auto.decide import Decision, SplitCandidate, decide
from axo.plans.auto.experts import EveryExpert, is_mixture
from axo.plans.auto.hugging_face import refuse_resizing
from axo.plans.auto.patterns import Override, overrides
from axo.plans.auto.regions import find_regions
from axo.plans.replace import Replacer, check_no_hooks, hooks_of
from axo.plans.report import LayerPlan, PlanReport


def apply(model: nn.Module, replacer: Replacer, plan: dict[str, str]) -> nn.Module:
    """Replace the layers of ``model`` in place.

    Args:
        model: Any serial module, real or on the meta device.
        replacer: Makes the parallel layers.
        plan: Patterns over names; empty: none.

    Raises:
        Refused: A pattern matches nothing or asks for what cannot be, or the model cannot be split exactly.
    """
    comms, grid, arrangement = replacer.comms, replacer.comms.grid, replacer.comms.arrangement
    _check(model, grid, arrangement)
    candidates, serial = _candidates(model, grid, arrangement)
    asked = overrides(plan, [c.name for c in candidates], [name for name, _ in model.named_modules()])
    choices = _choose(model, candidates, serial, asked, grid, arrangement)
    report = PlanReport([_line(c, choices.layers[c.name], grid, arrangement) for c in candidates])
    for candidate in candidates:  # nothing has changed yet
        if choices.layers[candidate.name].kind != "replicate":
            check_no_hooks(candidate.module, f"{type(candidate.module).__name__} {candidate.name!r}")
    _replace_all(model, candidates, choices, replacer)
    names = {module: name for name, module in model.named_modules()}
    for module, attention in choices.attentions.items():
        attention.install(module, names[module], comms, replacer.grad_reduce)
    for name, module in list(model.named_modules()):
        if not isinstance(module, ParallelLayer):
            report.layers += _left_whole(name, module) if name not in choices.layers else []
            replicate(module, comms, replacer.grad_reduce)
        if is_mixture(module) and arrangement.row_parts(grid) > 1:
            EveryExpert(module, gathers=grid.z > 1)
    SharedRandomness(comms, arrangement.rows).attach(model)
    if arrangement.row_parts(grid) > 1:
        AgreementCheck(comms, layers=not choices.one_way).watch(model)
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


@dataclass
class _Choices:
    """What becomes of a model.

    Attributes:
        layers: Name of each candidate -> its choice.
        attentions: The modules that are split by heads.
        inside: The axis of each dropout and group norm among activations that stay split.
        ties: (head, table) of those that share a weight and stay so.
        one_way: See ``regions.Traced``.
    """

    layers: dict[str, Decision] = field(default_factory=dict)
    attentions: dict[nn.Module, Attention] = field(default_factory=dict)
    inside: dict[nn.Module, str] = field(default_factory=dict)
    ties: list[tuple[str, str]] = field(default_factory=list)
    one_way: bool = False


def _choose(
    model: nn.Module,
    candidates: list[SplitCandidate],
    serial: dict[str, str],
    asked: dict[str, Override],
    grid: Grid,
    arrangement: Arrangement,
) -> _Choices:
    """Choose for every candidate; ``serial``: those that must stay so, with the reason. The model is as before."""
    choices = _Choices()
    whole = _choose_heads(model, [c for c in candidates if c.name not in serial], asked, grid, arrangement, choices)
    by_heads = dict(choices.layers)
    while True:
        free = [c for c in candidates if c.name not in by_heads and c.name not in serial]
        traced = find_regions(model, {c.module: c.size for c in free}, set(choices.attentions))
        if not traced.read:
            break
        serial |= {c.name: "another module reads its weight itself" for c in free if c.module in traced.read}
    layers, choices.inside = decide(free, traced.regions, asked, grid, arrangement)
    for candidate in free:
        choice = layers[candidate.name]
        choice.why = choice.why or f"whole: {traced.whole[candidate.module]}"
        if candidate.module in whole and not (choice.split_in or choice.split_out):
            choice.why = f"attention not by heads: {whole[candidate.module]}"
    layers |= {name: Decision("replicate", why=why) for name, why in serial.items()}
    choices.layers = layers | by_heads
    choices.ties = _ties(model, candidates, choices.layers)
    choices.one_way = traced.one_way
    return choices


def _choose_heads(
    model: nn.Module,
    candidates: list[SplitCandidate],
    asked: dict[str, Override],
    grid: Grid,
    arrangement: Arrangement,
    choices: _Choices,
) -> dict[nn.Module, str]:
    """Choose for the projections of attention that a table splits; for those of other attention, why it is whole."""
    sizes = {c.module: c.size for c in candidates if c.type in ("linear", "conv1d")}
    splitter = Splitter(grid.size(arrangement.inner), sizes)
    whole: dict[nn.Module, str] = {}
    done: set[nn.Module] = set()
    for name, module in model.named_modules():
        own = [part for part in module.modules() if part in sizes]
        if module in done or module in sizes or not own:
            continue
        try:
            attention = splitter.split(module, name)
        except ValueError as error:
            warnings.warn(f"parallelize: attention is not split by heads: {error}", stacklevel=5)
            whole |= dict.fromkeys(own, str(error))
            done |= set(module.modules())
            continue
        called = f"{type(module).__name__} {name.rpartition('.')[2]}".lower()
        if attention is None:
            if len(own) > 1 and ("attention" in called or "attn" in called):
                why = f"{name}: no table of heads for {type(module).__name__}; one would save what these layers gather"
                whole |= dict.fromkeys(own, why)
            continue
        layers = {f"{name}.{path}": choice for path, choice in attention.layers.items()}
        if _may_be_split(model, layers, asked):
            done |= set(module.modules())
            choices.attentions[module] = attention
            choices.layers |= {
                layer: Decision(kind, kind != "normal", kind == "normal", f"heads over {arrangement.inner}", options)
                for layer, (kind, options) in layers.items()
            }
    return whole


def _may_be_split(model: nn.Module, layers: dict[str, tuple[str, Any]], asked: dict[str, Override]) -> bool:
    """Whether the user neither says otherwise nor looks at whole activations: else easy mode for the module."""
    overridden = [(kind, asked.get(name)) for name, (kind, _) in layers.items()]
    otherwise = any(one and (one.kind != kind or one.split_in is not None) for kind, one in overridden)
    return not otherwise and not any(hooks_of(model.get_submodule(name)) for name in layers)


def _replace_all(model: nn.Module, candidates: list[SplitCandidate], choices: _Choices, replacer: Replacer) -> None:
    """Put in all parallel layers, and the dropouts and group norms among activations that stay split."""
    names = {module: name for name, module in model.named_modules()}
    tables = {name for tie in choices.ties for name in tie}
    became: dict[nn.Module, nn.Module] = {}
    for candidate in candidates:
        _replace(model, candidate, choices.layers[candidate.name], replacer, as_table=candidate.name in tables)
        became[candidate.module] = model.get_submodule(candidate.name)
    for module, axis in choices.inside.items():
        where, _, child = names[module].rpartition(".")
        parent, old = model.get_submodule(where), cast(Any, module)
        if isinstance(module, nn.GroupNorm):
            replacer.group_norm(parent, child, names[module], axis=axis)
        else:
            split = (axis, *replacer.comms.arrangement.rows)
            new = Dropout(old.p, old.inplace, comms=replacer.comms, split=split)
            setattr(parent, child, new.train(old.training))
        became[module] = getattr(parent, child)
    for module in list(model.modules()):  # a layer may be known under several names
        module._modules.update({name: became[child] for name, child in module._modules.items() if child in became})
    for head, table in choices.ties:
        model.get_submodule(head).weight = model.get_submodule(table).weight


def _candidates(model: nn.Module, grid: Grid, arrangement: Arrangement) -> tuple[list[SplitCandidate], dict[str, str]]:
    """The layers of ``model``, and those that must stay serial, with the reason."""
    candidates: list[SplitCandidate] = []
    serial: dict[str, str] = {}
    readers: dict[str, str] = {}
    for name, module in model.named_modules():
        inside = next((kind for prefix, kind in readers.items() if name.startswith(prefix)), None)
        candidate = _candidate(name, module)
        if candidate is None:
            plain = isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)
            if type(module).__module__.startswith("torch.nn.") and not plain and any(module.children()):
                readers[f"{name}."] = type(module).__name__
            continue
        candidates.append(candidate)
        module_: Any = module
        if not _is_plain(module):
            serial[name] = "it has parameters, buffers or a forward of its own (weight_norm, pruning, ...)"
        elif not module_.weight.is_floating_point():
            serial[name] = f"its weight is {module_.weight.dtype}"
        elif inside:
            serial[name] = f"inside a torch.nn.{inside}, which reads its layers' weights itself"
        elif candidate.type == "conv2d" and module_.groups > 1 and grid.x * grid.y > 1:
            serial[name] = f"groups={module_.groups}: a group's channels must meet on one rank"
        elif candidate.type in ("conv1d", "conv2d") and arrangement.square:
            serial[name] = f"algorithm {arrangement.name!r} has no {candidate.type}"
        elif candidate.type == "embedding" and (module_.max_norm or module_.sparse or module_.scale_grad_by_freq):
            serial[name] = "max_norm, sparse or scale_grad_by_freq"
    for group in _tied(model, candidates):
        biased = any(c is not None and c.type == "linear" and c.module.bias is not None for c in group)
        if not _is_table_with_heads(group) or (arrangement.square and biased):  # a bias does not lie as a table
            serial.update({c.name: "shares its weight" for c in group if c is not None})
    return candidates, serial


def _is_plain(module: nn.Module) -> bool:
    """Whether a layer is what its class makes of it."""
    own = set(module._parameters)
    return "weight" in own and own <= {"weight", "bias"} and not module._buffers and "forward" not in module.__dict__


def _tied(model: nn.Module, candidates: list[SplitCandidate]) -> list[list[SplitCandidate | None]]:
    """The owners of each weight that several modules share and a layer among them; None stands for any other module."""
    by_module = {c.module: c for c in candidates}
    groups = ([by_module.get(module) for module, _ in owners] for owners in tied_parameters(model).values())
    return [group for group in groups if any(group)]


def _is_table_with_heads(group: list[SplitCandidate | None]) -> bool:
    types = sorted(c.type if c is not None else "other" for c in group)
    return types == ["embedding"] + ["linear"] * (len(types) - 1)


def _candidate(name: str, module: Any) -> SplitCandidate | None:
    if type(module) is nn.Linear:
        return SplitCandidate(name, module, "linear", module.in_features, module.out_features)
    if type(module) is nn.Conv2d:
        return SplitCandidate(name, module, "conv2d", module.in_channels, module.out_channels)
    if type(module) is nn.Embedding:
        return SplitCandidate(name, module, "embedding", None, module.embedding_dim)
    if is_conv1d(module):
        return SplitCandidate(name, module, "conv1d", module.nx, module.nf)
    return None


def _ties(model: nn.Module, candidates: list[SplitCandidate], choices: dict[str, Decision]) -> list[tuple[str, str]]:
    """Heads that share an embedding's weight, with it; where the two are not split alike, both stay serial.

    Raises:
        Refused: They are not split alike, and activations beside them are split.
    """
    pairs = []
    for group in _tied(model, candidates):
        if not _is_table_with_heads(group):
            continue
        layers = [c for c in group if c is not None]
        (table,) = (c for c in layers if c.type == "embedding")
        kinds = {choices[c.name].kind for c in layers}
        if kinds == {"normal"}:
            pairs += [(c.name, table.name) for c in layers if c is not table]
        elif kinds != {"replicate"}:
            if any(choices[c.name].split_in or choices[c.name].split_out for c in layers):
                raise Refused(
                    f"parallelize: {', '.join(c.name for c in layers)} share one weight and cannot be split alike; give"
                    " all of them kind 'normal' or 'replicate' in a plan of patterns, or untie them"
                )
            why = "shares its weight with a layer that is split otherwise"
            choices.update({c.name: Decision("replicate", why=why) for c in layers})
    return pairs


def _replace(
    model: nn.Module, candidate: SplitCandidate, choice: Decision, replacer: Replacer, *, as_table: bool
) -> None:
    if choice.kind == "replicate":
        return
    parent_name, _, child = candidate.name.rpartition(".")
    if not candidate.name:
        raise Refused(
            f"parallelize: the model is itself a {type(model).__name__}; put it into a module, or use"
            f" axo.nn.{type(model).__name__}"
        )
    parent, name = model.get_submodule(parent_name), candidate.name
    if candidate.type == "embedding":
        replacer.embedding(parent, child, name, gather_output=not choice.split_out)
        return
    options: dict[str, Any] = {
        "transposed": choice.kind == "transposed",
        "scatter_input": not choice.split_in,
        "gather_output": not choice.split_out,
        **choice.options,
    }
    if candidate.type == "conv2d":
        replacer.conv2d(parent, child, name, **options)
    elif candidate.type == "linear":
        replacer.linear(parent, child, name, uneven_out=not choice.split_out, as_table=as_table, **options)
    else:
        transposed = options.pop("transposed")
        new = Conv1D(
            candidate.module,
            comms=replacer.comms,
            transposed=transposed,
            grad_reduce=replacer.grad_reduce,
            features=Features(**options),
            name=name,
        )
        replacer.put(parent, child, new)


def _line(candidate: SplitCandidate, choice: Decision, grid: Grid, arrangement: Arrangement) -> LayerPlan:
    """What one row costs in all-gathers: this rank's part, where the axis has more than one."""
    module: Any = candidate.module
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


def _left_whole(name: str, module: nn.Module) -> list[LayerPlan]:
    """The row of a module of no known kind whose own weights are large: since transformers 5, all experts in one."""
    for own, weight in module.named_parameters(recurse=False):
        if weight.ndim > 2 and min(weight.shape) > 1:
            why = f"{own} has {weight.ndim} dimensions: such weights stay whole on every rank"
            return [LayerPlan(name, type(module).__name__, "replicate", False, False, 0, 0, why)]
    return []


def _shares(model: nn.Module, line: LayerPlan) -> bool:
    """Whether another layer, which comes first, gathers the gradient of its input too."""
    layer = model.get_submodule(line.name)
    return isinstance(layer, Linear) and not layer.sums_input_grad


def _warn(report: PlanReport) -> None:
    whole = [line for line in report if line.kind == "replicate" and not line.why.startswith("plan ")]
    if whole:
        lines = "; ".join(f"{line.name}: {line.why}" for line in whole[:4])
        more = f" (and {len(whole) - 4} more)" if len(whole) > 4 else ""
        warnings.warn(f"parallelize: {len(whole)} layers stay serial on every rank: {lines}{more}", stacklevel=4)
