"""A model in pipeline stages, as a program written for one whole model sees it.

    logits = model(ids)                       with gradients: a stand-in of their shape, and nothing has run
    loss = cross_entropy(logits, targets)     one step of the schedule; the loss, on every rank
    (loss / n).backward()                     puts the gradients of the step into .grad, times 1 / n

The loss call is where inputs and targets are both known, so that is where the schedule runs. Its gradients wait until
``backward`` says by what factor the loss counts, and are then added to ``.grad``; a loss that is thrown away leaves
nothing. (A gradient scaler's factor is in the schedule already, so that small gradients survive in fp16.)

Without gradients the rows go through the stages at once, and the last stage gives its logits to all ranks.

Fewer rows than micro-batches are filled up with rows that count for nothing. Not here: other models than LitGPT's
(``axo.pipeline`` takes them).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any

import torch
from torch import nn

from axo import pipeline
from axo.checkpoint.ranks import checkpoint_group, share
from axo.checkpoint.state import parameter_names
from axo.comm.connect import Communicators
from axo.errors import Refused
from axo.nn.placeholder import Placeholder
from axo.perf.pipeline_schedule import rank_of
from axo.pipeline.cut import part_of, view

STAGES = "_axo_stages"
_ALLOWED = {"__getitem__", "__get__", "size", "dim", "numel", "to", "is_floating_point", "storage_offset"}


class StagedLogits(torch.Tensor):
    """Logits that no rank has yet: the shape, for the loss call. Whatever wants values is refused."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.__name__ not in _ALLOWED:
            raise Refused(
                f"AxoStrategy: {func.__name__} wants logits, and in training with pipeline stages they never leave the"
                " last stage; give what the model returns to fabric.strategy.cross_entropy(logits, targets), or run the"
                " model under torch.no_grad()"
            )
        return super().__torch_function__(func, types, args, kwargs or {})


class StageRunner:
    """This rank's stages of one model, and the schedule that runs them.

    Args:
        model: A LitGPT model that has been parallelized, on the meta device; this rank's part of it afterwards.
        comms: With several stages.
        schedule, microbatches: As of :func:`axo.pipeline.schedule`; micro-batches of what one call of the model takes.
        cuts: As of :func:`axo.pipeline.split`.
        context: Entered around each forward pass.

    Attributes:
        entries: Names of the whole model's state dict, in order.
        parameters: Names of its parameters, in order.
        modules: The stages of this rank.

    Raises:
        ValueError: The model cannot be cut in so many stages.
        Refused: It is not LitGPT's.
    """

    def __init__(
        self,
        model: nn.Module,
        comms: Communicators,
        schedule: str,
        cuts: str | Sequence[int],
        microbatches: int,
        context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        from litgpt.model import GPT

        if not isinstance(model, GPT):
            raise Refused(
                f"AxoStrategy: pipeline={comms.stages} is of litgpt.GPT, and this is a {type(model).__qualname__}; cut"
                " it by axo.pipeline.split in a program of your own"
            )
        self.comms, self._name, self._microbatches, self._context = comms, schedule, microbatches, context
        self.entries = list(model.state_dict(keep_vars=True))
        self.parameters = [name for name, _ in model.named_parameters()]
        self._columns: int = model.lm_head.out_features  # type: ignore[assignment]
        layout = pipeline.layout(schedule)
        self.modules = pipeline.split(model, comms, cuts, views=True, **layout)
        parts = [part_of(module) for module in self.modules]
        self._numbers = [part.index for part in parts if part is not None]
        self._count, self._features = next((part.stages, part.features) for part in parts if part is not None)
        self._homes = [rank_of(number, self._count, comms.stages, layout["order"]) for number in range(self._count)]
        self._model = model
        self._given: tuple[torch.Tensor, list[StagedLogits]] | None = None
        self._schedule: tuple[tuple[int, int], pipeline.Schedule] | None = None
        self._loss_of: Callable[[Any, torch.Tensor], torch.Tensor]
        model.__dict__[STAGES] = self
        transformer, blocks = view(model.get_submodule("transformer")), _OwnBlocks()
        blocks.__dict__.update(view(model.get_submodule("transformer.h")).__dict__)
        transformer._modules["h"] = blocks
        model._modules["transformer"] = transformer
        model.forward = MethodType(_staged, model)

    # --- the whole model, for checkpoints ----------------------------------------------------------------------------

    def share(self, mine: Any) -> list[Any]:
        """What each stage has, by stage. Every rank must call it."""
        return share(checkpoint_group(self.comms), mine)[:: self.comms.grid.world_size]

    def names_of(self, optimizer: torch.optim.Optimizer) -> tuple[list[list[str]], list[list[str]]]:
        """The names in the whole model of the parameters of each group: of this rank's, and of all stages' together.

        Those of all stages are in the order of the whole model. Every rank must call it.

        Raises:
            ValueError: The stages' optimizers have different numbers of groups.
        """
        own = parameter_names(self._model, optimizer)
        every = self.share(own)
        counts = [len(groups) for groups in every]
        if len({*counts}) > 1:
            raise ValueError(
                f"checkpoint: the optimizers of the {len(every)} stages have {counts} groups; a whole checkpoint wants"
                " as many on every stage, an empty one too"
            )
        joined = [set(itertools.chain(*groups)) for groups in zip(*every, strict=True)]
        return own, [[name for name in self.parameters if name in group] for group in joined]

    def bring(self, whole: torch.Tensor | None, holder: int, like: torch.Tensor) -> torch.Tensor | None:
        """A tensor that the ranks of stage ``holder`` have whole, on rank 0 of all ranks. Every rank must call it.

        ``like`` has its shape and dtype.
        """
        line = self.comms.pipeline
        if self.comms.rank or line.rank not in (0, holder):
            return None
        if holder == 0:
            return whole
        if line.rank == holder:
            assert whole is not None
            line.send(whole.to(self.comms.device).contiguous().view(-1).view(torch.uint8), 0)
            return None
        came = torch.empty_like(like, device=self.comms.device)
        line.recv(came.view(-1).view(torch.uint8), holder)
        return came

    # --- training -------------------------------------------------------------------------------------------------

    def announce(self, ids: torch.Tensor, chunk: int) -> StagedLogits | list[StagedLogits]:
        """What the model returns with gradients: the shape of its logits, or of chunks of them along the tokens."""
        parts = ids.split(chunk, 1) if chunk else (ids,)
        shapes = [(*part.shape, self._columns) for part in parts]
        logits = [torch.empty(shape, device="meta").as_subclass(StagedLogits) for shape in shapes]
        self._given = ids, logits
        return list(logits) if chunk else logits[0]

    def loss(
        self,
        logits: torch.Tensor | Sequence[torch.Tensor],
        targets: torch.Tensor,
        summed: Callable[[Any, torch.Tensor], torch.Tensor],
        ignore_index: int,
        scale: float = 1.0,
    ) -> torch.Tensor:
        """Run the schedule; the mean loss of this rank's targets, the same on all stages.

        Args:
            logits: What the model returned, or all but its last tokens.
            targets: (rows, tokens) of these logits.
            summed: The loss of one micro-batch, summed over its targets.
            ignore_index: A target that counts for nothing.
            scale: What gradients are multiplied by until ``backward`` divides by it.

        Raises:
            ValueError: The logits are of another call, or do not begin at the first token, or the targets are others.
        """
        ids = self._inputs(logits, targets)
        wanted = torch.full_like(ids, ignore_index)
        wanted[:, : targets.shape[1]] = targets
        missing = self._microbatches - ids.shape[0]
        if missing > 0:
            ids = torch.cat([ids, ids[:1].expand(missing, -1)])
            wanted = torch.cat([wanted, wanted.new_full((missing, wanted.shape[1]), ignore_index)])
        weight = scale / (targets != ignore_index).sum().clamp(min=1)
        self._loss_of = lambda output, part: summed(output, part) * weight
        parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        losses: list[torch.Tensor] = []
        try:
            self._schedule_for(ids).step(ids, target=wanted, losses=losses)
            gradients = [parameter.grad for parameter in parameters]
        finally:
            for parameter, grad in zip(parameters, before, strict=True):
                parameter.grad = grad
        device = self.comms.device
        value = torch.stack(losses).sum().detach().float() if losses else torch.zeros((), device=device)
        value = self.comms.pipeline.broadcast(value.reshape(1), root=self._homes[-1]).squeeze(0)
        loss = (value / scale).requires_grad_()
        pending = [(parameter, grad) for parameter, grad in zip(parameters, gradients, strict=True) if grad is not None]
        loss.register_hook(lambda factor: _add(pending, factor / scale))
        return loss

    def _inputs(self, logits: Any, targets: torch.Tensor) -> torch.Tensor:
        parts = [logits] if isinstance(logits, torch.Tensor) else list(logits)
        ids, announced = self._given or (None, [])
        self._given = None
        same = len(parts) == len(announced) and all(map(_begins, parts, announced))
        if ids is None or not same:
            raise ValueError(
                "AxoStrategy: with pipeline stages the loss takes what the last call of the model returned, once, and"
                " from its first token on; call the model again, or leave out tokens at the end only"
            )
        tokens = sum(part.shape[1] for part in parts)
        if tuple(targets.shape) != (ids.shape[0], tokens):
            raise ValueError(
                f"AxoStrategy: targets have shape {tuple(targets.shape)}, and the logits are of {ids.shape[0]} rows of"
                f" {tokens} tokens"
            )
        return ids

    def _schedule_for(self, ids: torch.Tensor) -> pipeline.Schedule:
        """The schedule for rows of this length; only the last one made is kept, since it holds buffers."""
        rows, tokens = ids.shape
        if self._schedule is None or self._schedule[0] != (rows, tokens):
            most = -(-rows // self._microbatches)
            stages = pipeline.stages(self.modules, self.comms, rows=most, tokens=tokens, forward_context=self._context)
            schedule = pipeline.schedule(
                self._name,
                stages,
                microbatches=self._microbatches,
                loss=lambda output, target: self._loss_of(output, target),
                mean=False,
                rows=rows,
            )
            self._schedule = (rows, tokens), schedule
        self._prepare()
        return self._schedule[1]

    # --- without gradients ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def forward(self, ids: torch.Tensor, *positions: Any) -> torch.Tensor:
        """Whole logits (rows, tokens, V), fp32, on every rank; ``positions`` are LitGPT's, of a cache of keys."""
        self._prepare()
        line, homes = self.comms.pipeline, self._homes
        cached = any(position is not None for position in positions)
        pieces = [ids] if cached else list(ids.tensor_split(min(self._microbatches, ids.shape[0])))
        dtype = next(p.dtype for p in self._model.parameters() if p.is_floating_point())
        within: dict[int, list[torch.Tensor]] = {}  # from one stage of this rank to its next
        under_way: list[Any] = []
        logits: list[torch.Tensor] = []
        for number, module in sorted(zip(self._numbers, self.modules, strict=True)):
            for index, piece in enumerate(pieces):
                given = piece
                if number and homes[number - 1] == line.rank:
                    given = within[number][index]
                elif number:
                    given = torch.empty((*piece.shape, self._features), dtype=dtype, device=self.comms.device)
                    line.recv(given, homes[number - 1])
                output = module(given, *positions)
                if number == self._count - 1:
                    logits.append(output.float())
                elif homes[number + 1] == line.rank:
                    within.setdefault(number + 1, []).append(output)
                else:
                    under_way.append(line.send(output.to(dtype).contiguous(), homes[number + 1], async_op=True))
        for work in under_way:
            work.wait()
        whole = torch.cat(logits) if logits else torch.empty((*ids.shape, self._columns), device=self.comms.device)
        return line.broadcast(whole, root=homes[-1])

    def _prepare(self) -> None:
        """Tell the stages what the program has set on the model: lengths, and the mask of a cache."""
        for module in self.modules:
            for name in ("_max_seq_length", "mask_cache"):
                module.__dict__[name] = self._model.__dict__.get(name)


def _staged(
    model: nn.Module,
    idx: torch.Tensor,
    input_pos: torch.Tensor | None = None,
    input_pos_maxp1: int | None = None,
    lm_head_chunk_size: int = 0,
) -> Any:
    """Stands for ``forward`` of LitGPT's model: through the stages."""
    stages: StageRunner = model.__dict__[STAGES]
    if torch.is_grad_enabled():
        if input_pos is not None:
            raise Refused("AxoStrategy: with pipeline stages input_pos is for torch.no_grad(); leave it out")
        return stages.announce(idx, lm_head_chunk_size)
    logits = stages.forward(idx, input_pos, input_pos_maxp1)
    return list(logits.split(lm_head_chunk_size, 1)) if lm_head_chunk_size else logits


class _OwnBlocks(nn.ModuleList):
    """The blocks of the whole model by number; who goes through them meets those of this rank."""

    def __iter__(self) -> Iterator[nn.Module]:
        return (block for block in self._modules.values() if not isinstance(block, Placeholder))  # type: ignore[misc]


def _begins(part: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether ``part`` is ``whole``, or all rows of its first tokens."""
    bases = [tensor if tensor._base is None else tensor._base for tensor in (part, whole)]
    shapes = [(tensor.dim(), tensor.shape[0], tensor.shape[-1]) for tensor in (part, whole)]
    return bool(bases[0] is bases[1] and shapes[0] == shapes[1] and part.storage_offset() == 0)


def stages_of(model: nn.Module) -> StageRunner | None:
    """The stages of a model that a strategy has cut; None: it is whole."""
    return model.__dict__.get(STAGES)


@torch.no_grad()
def _add(pending: list[tuple[torch.Tensor, torch.Tensor]], factor: torch.Tensor) -> None:
    """Give parameters their gradients of one schedule's step, times ``factor``; once."""
    for parameter, grad in pending:
        grad.mul_(factor)
        parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
    pending.clear()
