"""What a model computes, as a list of layers with whole (unsharded) sizes.

A `Workload` is a sequence of `Block`: the same layers (``axo.perf.layers``) ``repeat`` times over. A GPT is an
embedding, ``layers`` equal blocks, and norm + head + loss. Everything downstream (flops, memory, communication,
simulation) asks these layers only, so one model of a step serves transformers, U-Nets and a user's own ``nn.Module``.

Source of the GPT sizes: Table II of "Democratizing AI"; of the U-Nets: Table II of "A 4D Hybrid Algorithm".
It does not read files: see ``axo.perf.readers``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from axo import files
from axo.grid import Grid
from axo.perf.layers import (
    ACTIVATION,
    ACTIVATION_GATED,
    RESIDUAL,
    SPLIT,
    AttentionKind,
    EmbeddingKind,
    Layer,
    LinearKind,
    LossKind,
    NormKind,
    PointwiseKind,
    RoutingKind,
    Value,
)
from axo.perf.run_options import RunOptions

# Fields of LitGPT's latent attention, in the order of ``Latent``.
LATENT = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")


@dataclass(frozen=True, eq=False)
class Block(Value):
    """Layers that run in order, ``repeat`` times over; ``stacked``: one of a stack, which recomputation runs again."""

    layers: tuple[Layer, ...]
    repeat: int = 1
    stacked: bool = False

    @cached_property
    def once(self) -> Block:
        """One of it: what blocks of any number share."""
        return self if self.repeat == 1 else replace(self, repeat=1)

    def times(self, repeat: int) -> Block:
        """As many of it, which share the same one."""
        block = replace(self, repeat=repeat)
        block.__dict__["once"] = self.once
        return block

    @cached_property
    def branches(self) -> tuple[bool, bool]:
        """Whether norms stand before its branches (attention, MLP), and whether the branches read the same input."""
        norms = [
            layer for layer in self.layers if isinstance(layer, NormKind) and layer.on_stream and not layer.of_product
        ]
        return bool(norms), len(norms) == 1 or any(norm.shares_input for norm in norms)

    def unsummed(self, grid: Grid, run: RunOptions) -> Layer | None:
        """The layer whose product ends the block, if nothing behind it keeps anything, and tokens are split.

        Recomputation stops at its product, which is then not summed again: split tokens are summed apart from products.
        """
        last = next((layer for layer in reversed(self.layers) if not isinstance(layer, PointwiseKind)), None)
        return last if run.token_ranks(grid) > 1 and isinstance(last, LinearKind) and last.transposed else None

    def spread(self, ranks: int) -> Block:
        """The same with experts over so many neighbours along z."""
        layers = (replace(layer, spread=ranks) if layer.experts > 1 else layer for layer in self.layers)
        return replace(self, layers=tuple(layers))

    def reruns(self, run: RunOptions) -> bool:
        """Whether its forward runs again before its backward."""
        return self.stacked and run.recompute != "none"


@dataclass(frozen=True, eq=False)
class Workload(Value):
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
        config: The fields of ``from_litgpt``, of a transformer.
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
    config: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def spread(self, ranks: int) -> Workload:
        """The same with experts over so many neighbours along z."""
        return self if ranks == 1 else replace(self, blocks=tuple(block.spread(ranks) for block in self.blocks))

    @cached_property
    def experts(self) -> int:
        """Of a mixture, the fewest that there are; 0: it has none."""
        return min((layer.experts for _, layer in self.layers if isinstance(layer, RoutingKind)), default=0)

    @property
    def in_litgpt(self) -> bool:
        """Whether LitGPT has a configuration for it: then the engine can run it."""
        return bool(self.config) and "stacks" not in self.config

    def unrolled(self) -> Iterator[Block]:
        """Yield the blocks in forward order, repeats written out."""
        for block in self.blocks:
            for _ in range(block.repeat):
                yield block

    @cached_property
    def layers(self) -> tuple[tuple[int, Layer], ...]:
        """Every layer of each different block, and how often there is such a block."""
        return tuple((block.repeat, layer) for block in self.blocks for layer in block.layers)

    @cached_property
    def products(self) -> tuple[tuple[int, LinearKind], ...]:
        """Those of them that multiply."""
        return tuple((repeat, layer) for repeat, layer in self.layers if isinstance(layer, LinearKind))

    @cached_property
    def parameters(self) -> int:
        """Trainable values of the whole model."""
        return sum(repeat * layer.parameters for repeat, layer in self.layers)

    @cached_property
    def of_products(self) -> int:
        """Those of them that products read."""
        return sum(repeat * layer.parameters for repeat, layer in self.products)

    @cached_property
    def matrices(self) -> tuple[tuple[int, LinearKind], ...]:
        """Those of the products whose weights are matrices of hidden layers, and how many there are of each."""
        return tuple((repeat * one.experts, one) for repeat, one in self.products if not one.head)

    @cached_property
    def linears(self) -> int:
        """Weights that products read, of the whole model: what the cache of gathered weights counts as layers."""
        return sum(repeat * layer.experts for repeat, layer in self.products)

    def copied(self, grid: Grid) -> int:
        """Values that are held more than once on ``grid`` (keys and values that neighbours along x share), added up."""
        return sum(
            repeat * layer.kv_features * layer.in_features * (layer.kv_copies(grid.x) - 1)
            for repeat, layer in (self.products if 0 < self.kv_heads < grid.x else ())
        )

    def misfit(self, grid: Grid) -> str:
        """Say which size an axis of ``grid`` does not divide; empty when all do."""
        for what, size, axis in self._sizes:
            if size % grid.size(axis):
                return f"{axis}={grid.size(axis)} does not divide {what}={size}"
        if 0 < self.kv_heads < grid.x:
            if grid.x % self.kv_heads:
                return f"x={grid.x} neither divides kv_heads={self.kv_heads} nor is a multiple of it"
            if any(isinstance(layer, NormKind) and layer.over == "x" for _, layer in self.layers):
                return f"x={grid.x} is more than kv_heads={self.kv_heads}, whose keys are normalised together"
        elif self.kv_heads % grid.x:
            return f"x={grid.x} does not divide kv_heads={self.kv_heads}"
        return ""

    @cached_property
    def _sizes(self) -> list[tuple[str, int, str]]:
        sizes = [("heads", self.heads, "x"), *(size for _, layer in self.layers for size in layer.divides())]
        return [entry for entry in dict.fromkeys(sizes) if entry[1]]

    @cached_property
    def splits_tokens(self) -> bool:
        """Whether ``axo.parallelize`` can split its tokens over x (sequence parallelism)."""
        return any(layer.gathers for _, layer in self.products)

    @cached_property
    def stacked(self) -> bool:
        """Whether it has a stack of blocks, which recomputation can run again."""
        return any(block.stacked for block in self.blocks)


@dataclass(frozen=True)
class Experts:
    """A mixture of experts (SwiGLU each), each cut like a dense MLP; ``Workload.spread`` lays them over ranks.

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
        layers: list[Layer] = [LinearKind("mlp.gate", hidden, self.count, whole="sum")]
        for name, width, count, rows in (
            ("experts", self.intermediate, self.count, self.per_token / self.count),
            ("shared_experts", self.shared, 1, 1.0),
        ):
            if not width:
                continue
            each: tuple[Layer, ...] = (
                LinearKind(f"mlp.{name}.fc_1", hidden, width, bias=bias),
                LinearKind(f"mlp.{name}.fc_2", hidden, width, bias=bias, shares_input=True),
                PointwiseKind(f"mlp.{name}.act", width, moves=ACTIVATION_GATED, kept=3),
                LinearKind(f"mlp.{name}.proj", width, hidden, bias=bias, transposed=True),
                PointwiseKind(f"mlp.{name}.add", hidden, transposed=True, moves=RESIDUAL)
                if name == "shared_experts"
                else RoutingKind(f"mlp.{name}.routing", hidden, transposed=True),
            )
            layers += [replace(layer, rows=rows, experts=count) for layer in each]
        return tuple(layers)


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek's): queries, and keys and values, come from small vectors that are whole.

    Args:
        queries, keys: Width of the one, and of the other.
        rotary, plain: Features of a head's queries and keys: those that positions turn, which all heads of keys share,
            and the others.
        values: Of a head's values.
    """

    queries: int
    keys: int
    rotary: int
    plain: int
    values: int

    def layers(self, hidden: int, heads: int, norm: str, bias: bool) -> tuple[Layer, ...]:
        """The layers of one block's attention."""
        turns, turned, values = self.rotary, self.plain + self.rotary, heads * (self.plain + self.values)
        return (
            LinearKind("attn.q_a", hidden, self.queries, bias=bias, whole="gather"),
            NormKind("attn.q_a_norm", self.queries, norm=norm, over="whole"),
            LinearKind("attn.q_b", self.queries, heads * turned),
            LinearKind(
                "attn.kv_a", hidden, self.keys + turns, bias=bias, whole="gather", shares_input=True, shared=turns
            ),
            NormKind("attn.kv_a_norm", self.keys, norm=norm, over="whole"),
            LinearKind("attn.kv_b", self.keys, values),
            PointwiseKind("attn.split", values, moves=SPLIT, kept=1),
            # A product of its scores is as wide as queries, the other as values.
            AttentionKind("attn", heads * (turned + self.values) // 2, heads=heads, kv_groups=heads, shared=turns),
            LinearKind("attn.proj", heads * self.values, hidden, transposed=True),
        )


def sample_length(longest: object) -> int:
    """Tokens of a sample where nobody says: 2048, or the model's longest if that is less."""
    return min(2048, longest) if isinstance(longest, int) and longest > 0 else 2048


def from_litgpt(config: Mapping[str, Any], *, seq_length: int | None = None) -> Workload:
    """A transformer of these fields of ``litgpt.Config``: qkv and fc are normal layers, both proj transposed, so the
    residual stream stays split over y.

    Args:
        config: The fields; one that is left out is as LitGPT has it. Beside them, of models that LitGPT has not:
            ``stacks``, runs of blocks with the same MLP (how many, and their ``Experts`` or None); ``qkv_bias``, where
            that is not ``bias`` or ``attn_bias``; ``positions``, rows of a table of learned positions; ``tied``,
            whether the head reads the embedding's table.
        seq_length: Tokens of a sample; None: ``sample_length``.

    Raises:
        ValueError: A field is missing, or is no count.
    """
    name = str(config.get("name") or "litgpt model")
    kind, latent, longest = config.get("mlp_class_name"), config.get("latent_attention"), config.get("block_size")
    hidden, heads = _count(config, name, "n_embd"), _count(config, name, "n_head")
    head_size = _optional(config, name, "head_size")
    if not head_size and hidden % heads:
        raise ValueError(f"model {name!r}: {heads} heads do not divide the width {hidden}, and there is no head_size")
    head_size, kv_heads = head_size or hidden // heads, _optional(config, name, "n_query_groups") or heads
    intermediate = _optional(config, name, "intermediate_size") or 4 * hidden
    tokens = seq_length or sample_length(longest)
    norm = "rmsnorm" if config.get("norm_class_name") == "RMSNorm" else "layernorm"
    bias, gated = bool(config.get("bias", True)), kind in ("LLaMAMLP", "GemmaMLP", "LLaMAMoE")
    qkv_bias = bool(config.get("qkv_bias", bias or config.get("attn_bias", False)))
    norm_qk = ("all" if config.get("norm_qk_type") == "olmo2" else "heads") if config.get("norm_qk") else ""
    before = [config.get("norm_1", True), config.get("norm_2", True) and not config.get("shared_attention_norm")]
    stacks = config.get("stacks") or _stacks(config, name, kind == "LLaMAMoE")
    gathers = not any(experts for _, experts in stacks)
    fc = LinearKind("mlp.fc", hidden, intermediate, bias=bias, shares_input=sum(before) == 1, gathers=gathers)
    dense = (
        *([replace(fc, name="mlp.fc_1"), LinearKind("mlp.fc_2", hidden, intermediate, bias=bias, shares_input=True)]
          if gated else [fc]),
        PointwiseKind("mlp.act", intermediate, moves=ACTIVATION_GATED if gated else ACTIVATION, kept=3 if gated else 1),
        LinearKind("mlp.proj", intermediate, hidden, bias=bias, transposed=True),
    )  # fmt: skip
    qkv, inner = (heads + 2 * kv_heads) * head_size, heads * head_size
    scores = tokens * bool(config.get("attention_logit_softcapping"))
    attention: tuple[Layer, ...] = (
        LinearKind("attn.qkv", hidden, qkv, bias=qkv_bias, kv_features=2 * kv_heads * head_size, kv_groups=kv_heads,
                   gathers=gathers),
        # Where every head has keys and values of its own, attention keeps v where qkv laid it: all of that is held.
        PointwiseKind("attn.split", qkv, moves=SPLIT, heads=heads, kv_groups=kv_heads, kept=int(bool(norm_qk))),
        *_norms_of_heads(norm_qk, norm, head_size, heads, kv_heads),
        AttentionKind("attn", inner, heads=heads, kv_groups=kv_heads, scores=scores),
        LinearKind("attn.proj", inner, hidden, bias=bias, transposed=True),
    )  # fmt: skip
    if latent:
        sizes = Latent(*(_count(latent, name, one) for one in LATENT))
        attention = sizes.layers(hidden, heads, norm, qkv_bias)
    parallel = bool(config.get("parallel_residual", True))
    behind_attention, behind_mlp = (
        [NormKind(f"post_{part}_norm", hidden, norm=norm, of_product=True)] * bool(config.get(f"post_{part}_norm"))
        for part in ("attention", "mlp")
    )

    def block(mlp: tuple[Layer, ...], count: int) -> Block:
        layers = (
            *([NormKind("norm_1", hidden, norm=norm)] if any(before) else []),
            *attention,
            *behind_attention,
            PointwiseKind("residual_1", hidden, transposed=True, moves=RESIDUAL),
            *([NormKind("norm_2", hidden, norm=norm, shares_input=parallel)] if all(before) else []),
            *mlp,
            *behind_mlp,
            PointwiseKind("residual_2", hidden, transposed=True, moves=RESIDUAL),
        )
        return Block(layers, count, stacked=True)

    vocab, positions = _count(config, name, "padded_vocab_size", "vocab_size"), config.get("positions", 0)
    tables = (EmbeddingKind("wte", vocab, hidden), *([EmbeddingKind("wpe", positions, hidden)] if positions else []))
    head = (
        NormKind("ln_f", hidden, norm=norm),
        LinearKind("lm_head", hidden, vocab, bias=bool(config.get("lm_head_bias")), uneven=True, gathers=gathers,
                   tied=bool(config.get("tied")), head=True),
        LossKind("loss", hidden, vocab, capped=bool(config.get("final_logit_softcapping"))),
    )  # fmt: skip
    stack = (block(dense if experts is None else experts.layers(hidden, bias), count) for count, experts in stacks)
    turned = int(head_size * config.get("rotary_percentage", 0.25))
    return Workload(
        name,
        (Block(tables), *stack, Block(head)),
        seq_length=tokens,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        vocab=vocab,
        longest=longest or 0,
        tables=2 * tokens * turned * (2 if config.get("rope_indices") else 1),  # sines and cosines
        config=config,
    )


def gpt(
    name: str, *, layers: int, hidden: int, heads: int, vocab: int = 50304, seq_length: int = 2048, **fields: Any
) -> Workload:
    """A GPT as the papers have it: biases, LayerNorm, one branch behind the other; ``fields``: of ``from_litgpt``.

    It counts no rotary tables.
    """
    sizes = {"name": name, "n_layer": layers, "n_embd": hidden, "n_head": heads, "padded_vocab_size": vocab}
    return replace(from_litgpt(sizes | {"parallel_residual": False} | fields, seq_length=seq_length), tables=0)


def _stacks(config: Mapping[str, Any], name: str, mixture: bool) -> list[tuple[int, Experts | None]]:
    """Runs of blocks with the same MLP: how many, and their experts (None: a dense MLP)."""
    layers = _count(config, name, "n_layer")
    if not mixture:
        return [(layers, None)]
    width = _count(config, name, "moe_intermediate_size", "intermediate_size")
    dense = min(layers, _optional(config, name, "first_k_dense_replace"))
    experts = Experts(_count(config, name, "n_expert"), _count(config, name, "n_expert_per_token"), width,
                      width * _optional(config, name, "n_shared_expert"))  # fmt: skip
    return [run for run in ((dense, None), (layers - dense, experts)) if run[0]]


def _norms_of_heads(which: str, norm: str, head_size: int, heads: int, kv_heads: int) -> tuple[Layer, ...]:
    """The norms of queries and of keys: "" for none, "heads": of each head, "all": of all of them together."""
    if not which:
        return ()
    over, width = ("x", 0) if which == "all" else ("", head_size)
    return tuple(
        NormKind(f"attn.{name}", count * head_size, width, norm=norm, over=over, shares_input=True)
        for name, count in (("norm_q", heads), ("norm_k", kv_heads))
    )


def _count(config: Mapping[str, Any], name: str, *names: str) -> int:
    for one in names:
        value = config.get(one)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        if value is not None:
            raise ValueError(f"model {name!r}: {one}={files.shown(value)} is not a whole number of at least 1")
    raise ValueError(f"model {name!r}: the configuration has no {' or '.join(names)}")


def _optional(config: Mapping[str, Any], name: str, field: str) -> int:
    """A count that may be missing, null or 0: 0 then."""
    return _count(config, name, field) if config.get(field) else 0


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
        return LinearKind(f"{size}.{part}", 9 * into, out, bias=True, transposed=transposed, rows=(size / image) ** 2)

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
