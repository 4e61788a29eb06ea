"""What a model computes, as a list of layers with whole (unsharded) sizes.

A `Workload` is a sequence of `Block`: the same layers ``repeat`` times over, checkpointed (run again before backward)
or not. A GPT is an embedding, ``layers`` equal blocks, and norm + head + loss. Everything downstream (flops, memory,
communication, simulation) reads these lists only, so one model of a step serves transformers, U-Nets and a user's
own ``nn.Module``.

Source of the GPT sizes: Table II of "Democratizing AI"; of the U-Nets: Table II of "A 4D Hybrid Algorithm".
It does not read files: see ``axo.perf.readers``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, cast

from axo.grid import Grid
from axo.matmul.cost import chunk

# Bytes moved for every row and feature, forward and backward, when PyTorch runs each operation by itself under bf16
# autocast: the residual stream is fp32, products take and give bf16.
RESIDUAL = (10.0, 12.0)  # fp32 + bf16 -> fp32; two fp32 gradients added
NORM = (
    14.0,
    18.0,
)  # fp32 -> fp32, then the cast to bf16 that the next product wants
SPLIT = (8.0, 8.0)  # q, k, v taken apart and laid out by heads; rotary embedding on two thirds of them
ACTIVATION_GATED, ACTIVATION = (6.0, 10.0), (4.0, 6.0)  # bf16

KINDS = ("linear", "embedding", "norm", "attention", "pointwise", "loss")


def hash_once(one: Any) -> int:
    """The hash of a frozen dataclass, computed once: layers, blocks and models are keys of what a search knows."""
    value = vars(one).get("_hash")
    if value is None:
        value = vars(one)["_hash"] = hash(tuple(getattr(one, each.name) for each in fields(one)))
    return cast("int", value)


@dataclass(frozen=True)
class Layer:
    """One layer with its whole sizes.

    Args:
        kind: One of ``KINDS``.
        name: For messages and traces.
        in_features: k of a linear layer; hidden size of the others; vocabulary of an embedding.
        out_features: n of a linear layer; embedding size of an embedding; vocabulary of the loss.
        bias: A linear layer's bias.
        transposed: x and y swap roles (Algorithm 1). An ``attention`` or ``pointwise`` layer that is transposed has its
            features split over y, else over x.
        rows: Rows a token: 1, but fewer for convolutions at a lower resolution and for experts.
        norm: "layernorm" or "rmsnorm".
        over: For a norm: the axis that splits what it normalises, "y" or "x"; "": it normalises each head by itself, so
            that only its weight, of ``out_features`` values, concerns other ranks.
        moves: For a pointwise layer: bytes moved to and from memory, forward and backward, for every row and feature.
        heads: How many heads an attention layer has, and the layer that takes queries, keys and values apart for it.
        scores: Of attention whose scores are capped, so that they are kept: tokens of a sequence.
        capped: For a loss: whether its logits are capped.
        input_grad: False for a layer whose input needs no gradient.
        uneven: out_features need not divide over its axis (a head over a vocabulary).
        experts: So many equal layers beside each other, each with ``rows`` rows a token.
        kv_features, kv_groups: Of a layer of queries, keys and values: how many of out_features, the last, are keys and
            values, and of how many groups; neighbours along x share a group where there are fewer groups than ranks.
            Of attention: the groups.
        shares_input: Its input is that of an earlier layer, which keeps it and sums its gradient for both.
        kept: For a pointwise layer: tensors of its width that it keeps for backward.
        of_product: For a norm: its input is a product's result, in the dtype of products.
        gathers: For a linear layer: the first of those that read the same tokens, which sequence parallelism gathers.
        tied: Its weight is the embedding's, which counts it.
    """

    kind: str
    name: str
    in_features: int
    out_features: int = 0
    bias: bool = False
    transposed: bool = False
    rows: float = 1.0
    norm: str = "layernorm"
    moves: tuple[float, float] = (0.0, 0.0)
    heads: int = 0
    input_grad: bool = True
    uneven: bool = False
    over: str = "y"
    experts: int = 1
    kv_features: int = 0
    kv_groups: int = 0
    shares_input: bool = False
    kept: int = 0
    scores: int = 0
    capped: bool = False
    of_product: bool = False
    gathers: bool = False
    tied: bool = False

    __hash__ = hash_once

    @cached_property
    def nameless(self) -> Layer:
        """The same without its name: layers that cost the same."""
        return replace(self, name="")

    @cached_property
    def on_stream(self) -> bool:
        """Whether it works on the residual stream, token by token: what sequence parallelism splits over x."""
        return (self.kind == "norm" and self.over == "y") or (self.kind == "pointwise" and self.transposed)

    def kv_copies(self, ranks: int) -> int:
        """How many neighbours along x hold the same keys and values."""
        return ranks // self.kv_groups if 0 < self.kv_groups < ranks else 1

    def local_sizes(self, grid: Grid) -> tuple[int, int]:
        """Its k and n on one rank; keys and values that neighbours share each of them has whole."""
        x, y = (grid.y, grid.x) if self.transposed else (grid.x, grid.y)
        again = self.kv_features * (self.kv_copies(x) - 1)
        return chunk(self.in_features, y), chunk(self.out_features + again, x)

    @cached_property
    def parameters(self) -> int:
        """Trainable values of the whole layer."""
        if self.kind == "linear":
            weight = 0 if self.tied else self.in_features * self.out_features
            return self.experts * (weight + (self.out_features if self.bias else 0))
        if self.kind == "embedding":
            return self.in_features * self.out_features
        if self.kind == "norm":
            return (self.out_features or self.in_features) * (2 if self.norm == "layernorm" else 1)
        return 0


@dataclass(frozen=True)
class Block:
    """Layers that run in order, ``repeat`` times over."""

    layers: tuple[Layer, ...]
    repeat: int = 1
    checkpointed: bool = False

    __hash__ = hash_once

    @cached_property
    def once(self) -> Block:
        """One of it, whose forward runs once: what blocks of any number share."""
        return self if self.repeat == 1 and not self.checkpointed else Block(self.layers)


@dataclass(frozen=True)
class Workload:
    """A model as the planner sees it.

    Args:
        name: As the user asked for it.
        blocks: In forward order.
        seq_length: Tokens of one sample: the smallest piece of a batch that a rank can take.
        hidden: Width of the residual stream (0: unknown).
        heads: Attention heads: x must divide them (0: no such limit).
        kv_heads: Key-value groups: x must divide them, or be a multiple (neighbours share a group then).
        vocab: Vocabulary (0: none).
        longest: Tokens that it was made for (0: any).
        tables: Values of rotary tables, which every rank holds whole.
        trained_as: What ``axo train --model`` calls it; empty: no model that it knows.
        file: Where it was read from; empty: it was asked for by name.
    """

    name: str
    blocks: tuple[Block, ...]
    seq_length: int
    hidden: int = 0
    heads: int = 0
    kv_heads: int = 0
    vocab: int = 0
    trained_as: str = ""
    file: str = ""
    longest: int = 0
    tables: int = 0

    __hash__ = hash_once

    def unrolled(self) -> Iterator[Block]:
        """Yield the blocks in forward order, repeats written out."""
        for block in self.blocks:
            for _ in range(block.repeat):
                yield block

    @cached_property
    def parameters(self) -> int:
        """Trainable values of the whole model."""
        return sum(block.repeat * layer.parameters for block in self.blocks for layer in block.layers)

    @cached_property
    def of_products(self) -> int:
        """Those of them that products read."""
        return sum(
            block.repeat * layer.parameters for block in self.blocks for layer in block.layers if layer.kind == "linear"
        )

    def copied(self, grid: Grid) -> int:
        """Values that are held more than once on ``grid`` (keys and values that neighbours along x share), added up."""
        if not 0 < self.kv_heads < grid.x:
            return 0
        return sum(
            block.repeat * layer.kv_features * layer.in_features * (layer.kv_copies(grid.x) - 1)
            for block in self.blocks
            for layer in block.layers
        )

    def misfit(self, grid: Grid) -> str:
        """Say which size an axis of ``grid`` does not divide; empty when all do."""
        for what, size, axis in self._sizes:
            ranks = grid.size(axis)
            if size % ranks:
                return f"{axis}={ranks} does not divide {what}={size}"
        if 0 < self.kv_heads < grid.x:
            if grid.x % self.kv_heads:
                return f"x={grid.x} neither divides kv_heads={self.kv_heads} nor is a multiple of it"
            if self._norms_all_keys:
                return f"x={grid.x} is more than kv_heads={self.kv_heads}, whose keys are normalised together"
        elif self.kv_heads % grid.x:
            return f"x={grid.x} does not divide kv_heads={self.kv_heads}"
        return ""

    @cached_property
    def _sizes(self) -> list[tuple[str, int, str]]:
        sizes = [("heads", self.heads, "x")]
        for layer in dict.fromkeys(layer for block in self.blocks for layer in block.layers):
            x, y = ("y", "x") if layer.transposed else ("x", "y")
            if layer.kind == "linear":
                sizes.append((f"{layer.name}.in_features", layer.in_features, y))
                if not layer.uneven:
                    sizes.append((f"{layer.name}.out_features", layer.out_features - layer.kv_features, x))
            elif layer.kind == "norm" and layer.over == "y":
                sizes.append((f"{layer.name}.features", layer.in_features, "y"))
        return [entry for entry in dict.fromkeys(sizes) if entry[1]]

    @cached_property
    def _norms_all_keys(self) -> bool:
        return any(layer.over == "x" for block in self.blocks for layer in block.layers)

    @cached_property
    def splits_tokens(self) -> bool:
        """Whether ``axo.parallelize`` can split its tokens over x (sequence parallelism)."""
        return any(layer.gathers for block in self.blocks for layer in block.layers)

    @cached_property
    def checkpointed(self) -> bool:
        """True when some block runs its forward again before backward."""
        return any(block.checkpointed for block in self.blocks)

    @property
    def linears(self) -> int:
        """Weights that products read, of the whole model: what the cache of gathered weights counts as layers."""
        return sum(
            block.repeat * layer.experts for block in self.blocks for layer in block.layers if layer.kind == "linear"
        )

    @cached_property
    def otherwise(self) -> Workload:
        """The same model run the other way: checkpointed where it is not, and the reverse."""
        return self.with_checkpointing(not self.checkpointed)

    def with_checkpointing(self, on: bool) -> Workload:
        """Return the same model with its repeated blocks checkpointed, or with none."""
        return replace(
            self, blocks=tuple(replace(block, checkpointed=on and block.repeat > 1) for block in self.blocks)
        )


@dataclass(frozen=True)
class Experts:
    """A mixture of experts (SwiGLU each), all of which all ranks hold, cut like a dense MLP.

    A token goes through ``per_token`` of ``count`` experts; the load is taken to be even, so an expert has
    ``per_token / count`` rows a token. Every token goes through one MLP of width ``shared`` too, if that is not 0.

    Args:
        count, per_token: Experts, and how many of them a token goes through.
        intermediate: Width of one.
        shared: Width of what every token goes through beside them.
    """

    count: int
    per_token: int
    intermediate: int
    shared: int = 0

    def layers(self, hidden: int, bias: bool) -> tuple[Layer, ...]:
        """The layers of one block's experts. Choosing and weighing tokens counts as memory traffic."""
        layers = [Layer("linear", "mlp.gate", hidden, self.count, uneven=True)]
        for name, width, count, rows in (
            ("experts", self.intermediate, self.count, self.per_token / self.count),
            ("shared_experts", self.shared, 1, 1.0),
        ):
            if not width:
                continue
            each = (
                Layer("pointwise", f"mlp.{name}.take", hidden, transposed=True, moves=SPLIT),
                Layer("linear", f"mlp.{name}.fc_1", hidden, width, bias),
                Layer("linear", f"mlp.{name}.fc_2", hidden, width, bias, shares_input=True),
                Layer("pointwise", f"mlp.{name}.act", width, moves=ACTIVATION_GATED, kept=3),
                Layer("linear", f"mlp.{name}.proj", width, hidden, bias, True),
                Layer("pointwise", f"mlp.{name}.add", hidden, transposed=True, moves=RESIDUAL),
            )
            layers += [replace(layer, rows=rows, experts=count) for layer in each]
        return tuple(layers)


def _norms_of_heads(which: str, norm: str, head_size: int, heads: int, kv_heads: int) -> tuple[Layer, ...]:
    """The norms of queries and of keys."""
    if not which:
        return ()
    over, width = ("x", 0) if which == "all" else ("", head_size)
    return tuple(
        Layer("norm", f"attn.{name}", count * head_size, width, norm=norm, over=over, shares_input=True)
        for name, count in (("norm_q", heads), ("norm_k", kv_heads))
    )


def gpt(
    name: str,
    *,
    layers: int,
    hidden: int,
    heads: int,
    vocab: int = 50304,
    seq_length: int = 2048,
    kv_heads: int = 0,
    intermediate: int = 0,
    gated: bool = False,
    bias: bool = True,
    qkv_bias: bool | None = None,
    head_bias: bool = False,
    norm: str = "layernorm",
    norms: int = 2,
    post_norms: tuple[bool, bool] = (False, False),
    head_size: int = 0,
    norm_qk: str = "",
    parallel: bool = False,
    stacks: Sequence[tuple[int, Experts | None]] = (),
    caps: tuple[bool, bool] = (False, False),
    positions: int = 0,
    tied: bool = False,
) -> Workload:
    """Build a GPT: qkv and fc are normal layers, both proj transposed, so the residual stream stays split over y.

    Args:
        kv_heads: Key-value groups; 0 means as many as heads.
        intermediate: Width of the MLP; 0 means 4 * hidden.
        gated: Two input products of the MLP (SwiGLU) instead of one.
        qkv_bias: A bias of the qkv layer; None: as ``bias``.
        norms: Norms of a block before attention and MLP: 2, 1 where they share one (parallel residual), or 0.
        post_norms: A norm behind attention's proj, and one behind the MLP's (Gemma 2).
        head_size: Width of one head; 0 means hidden // heads.
        norm_qk: Norms of queries and keys: "" for none, "heads": of each head, "all": of all of them together.
        parallel: Attention and MLP read the same input (parallel residual).
        stacks: Runs of blocks with the same MLP, in order: how many, and their experts (None: a dense MLP); (): all
            are dense.
        caps: Whether the scores of attention, and the logits, are capped (Gemma 2).
        positions: Rows of a table of learned positions; 0: none.
        tied: The head reads the embedding's table.
    """
    kv_heads = kv_heads or heads
    intermediate = intermediate or 4 * hidden
    head_size = head_size or hidden // heads
    inner = heads * head_size
    qkv = (heads + 2 * kv_heads) * head_size
    stacks = tuple(stacks) or ((layers, None),)
    gathers = not any(experts for _, experts in stacks)
    fc = [Layer("linear", "mlp.fc", hidden, intermediate, bias, shares_input=norms == 1, gathers=gathers)]
    if gated:
        fc = [
            replace(fc[0], name="mlp.fc_1"),
            Layer("linear", "mlp.fc_2", hidden, intermediate, bias, shares_input=True),
        ]
    keys = 2 * kv_heads * head_size
    dense = (
        *fc,
        Layer("pointwise", "mlp.act", intermediate, moves=ACTIVATION_GATED, kept=3)
        if gated
        else Layer("pointwise", "mlp.act", intermediate, moves=ACTIVATION, kept=1),
        Layer("linear", "mlp.proj", intermediate, hidden, bias, transposed=True),
    )

    def block(mlp: tuple[Layer, ...]) -> tuple[Layer, ...]:
        return (
            *([Layer("norm", "norm_1", hidden, norm=norm)] if norms else []),
            Layer(
                "linear",
                "attn.qkv",
                hidden,
                qkv,
                bias if qkv_bias is None else qkv_bias,
                kv_features=keys,
                kv_groups=kv_heads,
                gathers=gathers,
            ),
            # Where every head has keys and values of its own, attention keeps v where qkv laid it: all of that is held.
            Layer(
                "pointwise", "attn.split", qkv, moves=SPLIT, heads=heads, kv_groups=kv_heads, kept=int(bool(norm_qk))
            ),
            *_norms_of_heads(norm_qk, norm, head_size, heads, kv_heads),
            Layer("attention", "attn", inner, heads=heads, kv_groups=kv_heads, scores=seq_length * caps[0]),
            Layer("linear", "attn.proj", inner, hidden, bias, transposed=True),
            *([Layer("norm", "post_attention_norm", hidden, norm=norm, of_product=True)] if post_norms[0] else []),
            Layer("pointwise", "residual_1", hidden, transposed=True, moves=RESIDUAL),
            *([Layer("norm", "norm_2", hidden, norm=norm, shares_input=parallel)] if norms == 2 else []),
            *mlp,
            *([Layer("norm", "post_mlp_norm", hidden, norm=norm, of_product=True)] if post_norms[1] else []),
            Layer("pointwise", "residual_2", hidden, transposed=True, moves=RESIDUAL),
        )

    places = (Layer("embedding", "wpe", positions, hidden, input_grad=False),) if positions else ()
    return Workload(
        name,
        (
            Block((Layer("embedding", "wte", vocab, hidden, input_grad=False), *places)),
            *(
                Block(block(dense if experts is None else experts.layers(hidden, bias)), count, True)
                for count, experts in stacks
            ),
            Block(
                (
                    Layer("norm", "ln_f", hidden, norm=norm),
                    Layer("linear", "lm_head", hidden, vocab, head_bias, uneven=True, gathers=gathers, tied=tied),
                    Layer("loss", "loss", hidden, vocab, capped=caps[1]),
                )
            ),
        ),
        seq_length=seq_length,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        vocab=vocab,
    )


def unet(name: str, *, channels: int) -> Workload:
    """Build a U-Net's 3x3 convolutions, as Nichol et al. and ``examples/unet`` have them.

    A convolution is a product with k = 9 * channels in and a row for each pixel; an image is a "sequence" of image^2
    tokens. Level i has ``channels * multiples[i]`` channels and half the height and width of the one before; on the way
    up a block reads what the way down left, too.

    "A 4D Hybrid Algorithm" gives levels, residual blocks and channels, not the multiples. (1, 2, 2, 2) are those of
    Nichol et al. for images of 32 x 32: the example's model then has 196M, 518M, 784M, 1.8B and 3.1B parameters for the
    paper's 250M, 500M, 1B, 2B and 4B. With (1, 2, 3, 4), theirs for 64 x 64, it would have 441M to 7.1B. Time
    embeddings, attention and 1x1 convolutions, a fifth of the parameters, are left out.
    """
    image, multiples, res_blocks = 32, (1, 2, 2, 2), 3
    size, blocks = image, list[Block]()

    def conv(part: str, into: int, out: int, transposed: bool = False) -> Layer:
        return Layer("linear", f"{size}.{part}", 9 * into, out, True, transposed, rows=(size / image) ** 2)

    def residual(into: int, out: int) -> None:
        blocks.append(Block((conv("conv_1", into, out), conv("conv_2", out, out, transposed=True))))

    width, widths, last = channels, [channels], len(multiples) - 1
    for level, multiple in enumerate(multiples):
        for _ in range(res_blocks):
            residual(width, multiple * channels)
            width = multiple * channels
            widths.append(width)
        if level < last:
            size //= 2
            blocks.append(Block((conv("down", width, width),)))
            widths.append(width)
    for _ in range(2):
        residual(width, width)
    for level, multiple in reversed(list(enumerate(multiples))):
        for _ in range(res_blocks + 1):
            residual(width + widths.pop(), multiple * channels)
            width = multiple * channels
        if level:
            size *= 2
            blocks.append(Block((conv("up", width, width),)))
    return Workload(name, tuple(blocks), seq_length=image * image, hidden=channels)
