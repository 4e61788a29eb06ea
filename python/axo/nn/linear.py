"""A drop-in for ``nn.Linear`` whose weight, input and output are split over the grid.

    O[m, n] = I[m, k] @ weight[n, k]^T + bias[n]

| | normal | transposed |
|---|---|---|
| in_features k split over  | y | x |
| out_features n split over | x | y |
| ``weight`` on a rank      | ``[n/Gx/Gz, k/Gy]`` | ``[n/Gy/Gz, k/Gx]`` |
| ``bias`` on a rank        | ``[n/Gx]``          | ``[n/Gy]`` |

A normal layer followed by a transposed one (and so on) needs no re-layout between them. What goes over which axis
stands in ``axo.matmul.product``; the table is Algorithm 1 of the AxoNN papers. Other algorithms split otherwise
(``axo.arrangement``): with Tesseract both kinds have features over y, and ``weight`` is ``[n/Gy, k/Gx]``.

Not here: re-layout of activations; convolutions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from axo.comm.connect import Communicators, check_comms
from axo.grid import Coords, Grid, Holders
from axo.matmul import activations, cost, engine_cost
from axo.matmul.blocks import layer_matmul
from axo.matmul.cost import Call
from axo.matmul.shared_input import SharedInput
from axo.nn.layer import ParallelLayer, default_device, label_of
from axo.nn.sequence import add_bias, scatter_sequence
from axo.placement import Placement, check_copies, check_divides, check_whole
from axo.sharding import cut_features
from axo_kernels.fused import fp8


@dataclass(frozen=True)
class Features:
    """How a linear layer takes and returns features and tokens, where that is not the plain alternation.

    Args:
        out_blocks: Lengths of row blocks that are split one by one (q, k and v of a fused projection).
        out_copies: For each row block, how many neighbours along the out axis share one part of it: heads of keys and
            values that several ranks' queries attend to. Their gradient is summed over those ranks.
        uneven_out: Allow out_features that do not divide; the shards are then those of ``torch.chunk``.
        whole_output: The weight's out_features are not split: the layer returns all of them on every rank along the
            out axis. Each of these must give it the complete gradient. With Tesseract, whose weights lie in blocks in
            any case, they are split, unevenly where they must be, and gathered.
        scatter_input: Take all in_features on every rank and cut this rank's; backward gathers their gradient.
        gather_output: Return all out_features on every rank; backward takes this rank's slice of the gradient.
        sequence_parallel: Tokens are split over x where activations are replicated over x (``axo.nn.sequence``). A
            normal layer takes gathered tokens and leaves their gradient a partial sum, for ``gather_sequence``; a
            transposed layer returns its part of the tokens.
        as_table: The weight is an embedding's too and lies as the table does. With Tesseract, where that is otherwise
            than a linear layer's: the whole vocabulary is gathered over x, and this rank's part of the output is cut
            from all of it. No bias then.
        holders: The data ranks that hold the weight, an expert's; they alone call the layer. None: all.
    """

    out_blocks: tuple[int, ...] | None = None
    out_copies: tuple[int, ...] | None = None
    uneven_out: bool = False
    whole_output: bool = False
    scatter_input: bool = False
    gather_output: bool = False
    sequence_parallel: bool = False
    as_table: bool = False
    holders: Holders | None = None


_PLAIN = Features()


class Linear(ParallelLayer, nn.Linear):
    """Multiply by a weight that the grid shares: (..., in_features/Gin) -> (..., out_features/Gout).

    Args:
        in_features: Whole size k of the input.
        out_features: Whole size n of the output.
        bias: Add a learned bias.
        device: As in torch; default: torch's default device if set, else that of ``comms``.
        dtype: As in torch.
        comms: What ``axo.connect`` returned.
        transposed: Swap the roles of x and y.
        grad_reduce: ``"mean"`` averages gradients over the Gz * Gdata data ranks, ``"sum"`` adds them.
        gather_cache: As in ``axo.Overlap``, for a layer that is part of no model's engine: ``"all"`` keeps the weight
            gathered over z from forward to backward, ``"none"`` gathers it again.
        features: How features and tokens come and go where that is not the plain alternation; plans set it.
        name: How error messages call the layer.

    Raises:
        ValueError: A size does not divide over its axis, or an option is not known.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        comms: Communicators,
        transposed: bool = False,
        grad_reduce: str = "mean",
        gather_cache: str | int = "all",
        features: Features = _PLAIN,
        name: str | None = None,
    ) -> None:
        check_comms(type(self).__name__, comms)
        check_whole(label_of(self, name), 0, {"in_features": in_features, "out_features": out_features})
        arrangement = comms.arrangement
        in_axis, out_axis = arrangement.features(transposed)
        if features.whole_output and arrangement.square:
            features = replace(features, whole_output=False, uneven_out=True, gather_output=True)
        out_blocks, out_copies = features.out_blocks, features.out_copies
        whole_output, sequence_parallel = features.whole_output, features.sequence_parallel
        out_axes = () if whole_output else (out_axis,)
        self.as_table = features.as_table and arrangement.square
        splits = arrangement.table if self.as_table else arrangement.weight((in_axis,), out_axes)
        matrix = Placement((out_features, in_features), splits, out_blocks, comms, out_copies, holders=features.holders)
        placements = {"weight": self._stored(matrix)}
        if bias:
            placements["bias"] = replace(matrix, global_shape=(out_features,), splits=(out_axes,))
        self._start(comms, name, placements)
        if whole_output and (out_blocks or sequence_parallel):
            raise ValueError(f"{self.label()}: whole features with out_blocks or sequence_parallel are not supported")
        if self.as_table and bias:
            raise ValueError(f"{self.label()}: a bias with a weight that is an embedding's too is not supported")
        if sequence_parallel:
            arrangement.only_axonn(f"{self.label()}: sequence_parallel")
        check_divides(self.label(), "in_features", in_features, in_axis, comms.grid.size(in_axis))
        check_copies(self.label(), out_copies, out_axis, comms.grid.size(out_axis))
        blocks = () if features.uneven_out or whole_output else out_blocks or (out_features,)
        for block, copies in zip(blocks, out_copies or (1,) * len(blocks), strict=True):
            what = "out_features" if out_blocks is None else "a row block of out_features"
            check_divides(self.label(), what, block, out_axis, comms.grid.size(out_axis) // copies)
        self.in_features = self.in_features_whole = in_features
        self.out_features = self.out_features_whole = out_features
        self.transposed, self.out_blocks, self.out_copies = transposed, out_blocks, out_copies
        self.scatter_input, self.gather_output = features.scatter_input, features.gather_output
        self.in_axis, self.out_axis = in_axis, next(iter(out_axes), None)
        self.scatters_tokens = sequence_parallel and transposed and comms.grid.x > 1
        sums_output = not (sequence_parallel and transposed)
        sums_input_grad = not (self.as_table or (sequence_parallel and not transposed))
        self.matmul = layer_matmul(
            comms,
            matrix,
            in_axis=self.in_axis if sums_output else None,
            out_axis=self.out_axis if sums_input_grad else None,
            grad_reduce=grad_reduce,
            gather_cache=gather_cache,
        )
        if features.holders is not None:
            self.matmul.products.rows_agree = False
        self.exchanges = (self.matmul.exchange,)
        self.shared_input: SharedInput | None = None
        self.sums_input_grad = True  # of those that share one input, the first
        if not bias:
            self.register_parameter("bias", None)
        self._add_parameters(default_device(device, comms), dtype)
        self.reset_parameters()

    @staticmethod
    def _stored(matrix: Placement) -> Placement:
        """Where the parameter lies, of a weight ``[out, in]`` that lies as ``matrix`` says."""
        return matrix

    def _matrix(self) -> torch.Tensor:
        """This rank's part of the weight, ``[out, in]``."""
        return self.weight  # looked up once a pass: nn.Module's lookup is slow

    def use_fp8(self, scaling: str) -> None:
        """Multiply in eight bits from here on: ``"tensor"`` or ``"row"``, how many scales (``axo.parallelize``).

        Raises:
            ValueError: A part of a size on a rank is no multiple of 16, which GPUs need.
        """
        rows, columns = self.matmul.exchange.block_rows, self._matrix().shape[1]
        for size, name, axis in ((columns, "in_features", self.in_axis), (rows, "out_features", self.out_axis)):
            if size % fp8.MULTIPLE:
                raise ValueError(
                    f"{self.label()}: fp8={scaling!r} with {size} of {name} on a rank (split over {axis}), no multiple"
                    f" of {fp8.MULTIPLE}; pad the model, or take a grid that splits it less"
                )
        self.matmul.products.use_fp8(scaling)
        self.matmul.exchange.fp8 = scaling

    def serial(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        return nn.utils.skip_init(
            nn.Linear, self.in_features, self.out_features, self.bias is not None, device=device, dtype=dtype
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Multiply: (..., in_features/Gin) -> (..., out_features/Gout).

        Raises:
            ValueError: The input's last dim is not this rank's part of in_features.
        """
        weight = self._matrix()
        if getattr(input, "dtype", None) is not weight.dtype:
            self._check_dtype(input, weight)
        input_sum = None
        if self.shared_input is not None and input.requires_grad and torch.is_grad_enabled() and input.dim():
            exchange, axis = self.matmul.exchange, self.matmul.out_axis
            input, input_sum = self.shared_input.share(exchange, axis, input, self._cut)
            first = input_sum.exchange is exchange
            if first is not self.sums_input_grad:
                self.sums_input_grad = first
        elif self.scatter_input and input.dim():
            input = self._cut(input)
        if input.dim() == 0 or input.shape[-1] != weight.shape[1]:
            raise ValueError(
                f"{self.label()}: input of shape {tuple(input.shape)} must end in {weight.shape[1]}, this rank's"
                f" part of in_features={self.in_features} over {self.in_axis}="
                f"{self.matmul.exchange.sizes[self.in_axis]}; axo.shard_input(layer, tensor) cuts a whole one"
            )
        if self.scatters_tokens:
            output = scatter_sequence(self.matmul(input, weight, None), self.comms, owner=self.label())
            return output if self.bias is None else add_bias(output, self.bias, self.matmul.exchange)
        output = self.matmul(input, weight, self.bias, input_sum)
        if self.as_table and self.out_axis is not None:
            output = cut_features(output, self.comms, self.out_axis, self.out_features)
        if self.first_pass:
            self._first_pass(input, output)
        return self._gather_if_asked(output) if self.gather_output else output

    def _cut(self, input: torch.Tensor) -> torch.Tensor:
        """This rank's part of the features, where the layer takes all of them."""
        if not self.scatter_input or self.in_axis is None:
            return input
        return cut_features(input, self.comms, self.in_axis, self.in_features)

    def cost(
        self,
        rows: int,
        *,
        itemsize: int = 4,
        input_itemsize: int | None = None,
        input_grad: bool = True,
        recompute: bool = False,
    ) -> list[cost.Call]:
        """Count this layer's collectives on this rank in one step.

        Args:
            rows: m, rows of one data-parallel group (all ranks along z together). Of an expert with a ``holders``: rows
                that go to it, of all ranks, over its holders along data.
            itemsize: Bytes an element of the dtype that it computes in; the bias is reduced in its own.
            input_itemsize: Bytes an element of the input, as which the gradient of one that is cut here is gathered;
                None: as ``itemsize``.
            input_grad: Whether the input needs a gradient. Where layers share the input (``share_input``), it counts
                for the one that takes it first: the first one named, and after a pass the one that did.
            recompute: The forward runs again before backward (activation checkpointing).
        """
        holders = self.placements["weight"].holders
        if holders is not None and not holders.holds(self.comms.coords):
            return []  # an expert of another rank, which does not call it
        if self.as_table:
            calls = cost.table_head(
                self.comms.grid,
                rows,
                self.in_features,
                self.out_features,
                itemsize=itemsize,
                recompute=recompute,
                gathers=self._gathers(input_grad or recompute),
                arrangement=self.comms.arrangement,
                coords=self.comms.coords,
            )
            after = self._gathered(cost.rows_of(self.comms.arrangement, self.comms.grid, rows, self.comms.coords))
            return [
                *self._reduced(calls),
                *cost.relayout(self.comms.grid, 0, after, itemsize=itemsize, arrangement=self.comms.arrangement),
            ]
        sums = input_grad and self.sums_input_grad
        copied = [
            block for block, copies in zip(self.out_blocks or (), self.out_copies or (), strict=False) if copies > 1
        ]
        (grid, coords), transposed, arrangement = self._holders(), self.transposed, self.comms.arrangement
        if self.out_axis is None:  # features that are whole: as if it had one rank
            axis = arrangement.features(transposed)[1]
            grid, coords = replace(grid, **{axis: 1}), coords._replace(**{axis: 0})
        calls = cost.linear(
            grid,
            rows,
            self.in_features,
            self.out_features,
            self.bias is not None,
            transposed=transposed,
            itemsize=itemsize,
            bias_itemsize=4 if self.bias is None else self.bias.dtype.itemsize,
            recompute=recompute,
            gathers=self._gathers(input_grad or recompute),
            input_grad=sums,
            copied_features=sum(copied),
            copies=max(self.out_copies or (1,)) if copied else 1,
            sequence_parallel=self.scatters_tokens or self.matmul.out_axis != self.out_axis,
            arrangement=arrangement,
            coords=coords,
        )
        mine = cost.rows_of(arrangement, grid, rows, coords)
        before = mine * self.in_features if self.scatter_input and sums else 0
        after = self._gathered(mine)
        given = itemsize if input_itemsize is None or self.shared_input is not None else input_itemsize
        return [
            *self._reduced(calls),
            *cost.relayout(grid, before, 0, transposed=transposed, itemsize=given, arrangement=arrangement),
            *cost.relayout(grid, 0, after, transposed=transposed, itemsize=itemsize, arrangement=arrangement),
        ]

    def _holders(self) -> tuple[Grid, Coords]:
        """The ranks that hold the weight as a grid, and where this one stands in it."""
        grid, coords, holders = self.comms.grid, self.comms.coords, self.placements["weight"].holders
        return (grid, coords) if holders is None else (holders.grid(grid), holders.among(coords))

    def _rows(self, rows: int) -> int:
        return cost.rows_of(self.comms.arrangement, self._holders()[0], rows, self._holders()[1])

    def flops(self, rows: int) -> float:
        return activations.linear_flops(self._rows(rows), self._matrix().shape[1], self.matmul.exchange.block_rows)

    def saved_bytes(self, rows: int, *, itemsize: int = 4) -> float:
        """As of any layer; where layers share an input, the first keeps it for all."""
        if self.shared_input is not None and not self.sums_input_grad:
            return 0.0
        return activations.linear(self._rows(rows), self._matrix().shape[1], itemsize)

    def _reduced(self, calls: list[Call]) -> list[Call]:
        if self.matmul.exchange.fp8 is not None:
            columns = self._matrix().shape[1]
            calls = engine_cost.gathered_in_fp8(calls, columns, columns + fp8.SCALE_BYTES)
        return super()._reduced(calls)

    def _gathered(self, rows: int) -> int:
        """Elements of an output that is gathered, of ``rows`` rows: parts travel as long as the longest."""
        if not self.gather_output or self.out_axis is None:
            return 0
        parts = Placement((self.out_features,), ((self.out_axis,),), self.out_blocks, self.comms, self.out_copies)
        return rows * parts.max_local_shape()[0] * self.comms.grid.size(self.out_axis)

    def extra_repr(self) -> str:
        kind = "transposed" if self.transposed else "normal"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None},"
            f" {kind}, grid={self.comms.grid}, weight on this rank={tuple(self.weight.shape)}"
        )
