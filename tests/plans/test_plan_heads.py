"""plan="auto" splits attention of a known form by heads after a trial: nanoGPT's, a ViT's; any other stays whole.

Oracle: the same model, unchanged, trained serially in one process.
"""

import copy
import itertools
import math
import warnings
from collections import OrderedDict
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import axo
from axo.plans.auto.attention import Splitter
from axo.plans.auto.candidate import SplitCandidate
from examples.nanogpt.model import GPT, CausalSelfAttention, GPTConfig
from examples.vit.model import ViT
from tests.launcher import run_ranks
from tests.nn.support import (
    assert_close,
    assert_gradients_match,
    gradients_of,
    mean_over_data_ranks,
    my_rows,
    once,
    seed_apart,
    serial_seed,
)

LIMIT = 1e-5
WIDTH, HEADS, GROUPS, TOKENS = 32, 8, 4, 6


class Grouped(nn.Module):
    """Separate projections, groups of keys, norms of heads, rotation, an optional mask, a bias for each head."""

    def __init__(self):
        super().__init__()
        size = WIDTH // HEADS
        self.q, self.k, self.v = (nn.Linear(WIDTH, n * size) for n in (HEADS, GROUPS, GROUPS))
        self.o = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.RMSNorm(size)
        self.slopes = nn.Parameter(torch.linspace(0.1, 1, HEADS)[:, None, None])
        self.scale = nn.Parameter(torch.ones(size))
        self.register_buffer("angles", torch.outer(torch.arange(32.0), torch.arange(1.0, 1 + size)))

    def forward(self, x, mask=None):
        b, t, _ = x.shape
        q = self.norm(self.q(x).view(b, t, HEADS, -1)).transpose(1, 2) * self.scale
        k = self.k(x).view(b, t, GROUPS, -1).transpose(1, 2)
        v = self.v(x).view(b, t, GROUPS, -1).transpose(1, 2)
        half = q.shape[-1] // 2
        turned = torch.cat((-q[..., half:], q[..., :half]), -1)
        q = q * self.angles[:t].cos() + turned * self.angles[:t].sin()
        k = k.repeat_interleave(HEADS // GROUPS, 1)
        v = v[:, :, None].expand(b, GROUPS, HEADS // GROUPS, t, -1).reshape(b, HEADS, t, -1)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1)) + self.slopes
        if mask is not None:
            scores = scores.masked_fill(mask, float("-inf"))
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Fused(nn.Module):
    """One projection of unequal blocks; the slow path of nanoGPT, by einsum, with a mask in a buffer."""

    def __init__(self):
        super().__init__()
        self.size = WIDTH // HEADS
        self.qkv = nn.Linear(WIDTH, WIDTH + 2 * GROUPS * self.size)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)
        self.drop = nn.Dropout(0.0)
        self.register_buffer("mask", torch.tril(torch.ones(32, 32))[None, None])

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).split([WIDTH, GROUPS * self.size, GROUPS * self.size], -1)
        q = q.view(b, t, HEADS, self.size)
        k, v = (z.view(b, t, GROUPS, self.size).repeat_interleave(HEADS // GROUPS, 2) for z in (k, v))
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(k.size(-1))
        scores = scores.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf")).softmax(-1)
        return self.o(torch.einsum("bhts,bshd->bthd", self.drop(scores), v).flatten(2))


class Batched(nn.Module):
    """Heads and batch in one dim, for bmm."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def apart(self, z):
        return z.view(z.shape[0], z.shape[1], HEADS, -1).transpose(1, 2).reshape(-1, z.shape[1], WIDTH // HEADS)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k, v = self.apart(q), self.apart(k), self.apart(v)
        y = torch.bmm(F.softmax(torch.bmm(q, k.transpose(1, 2)), -1), v)
        return self.o(y.view(b, HEADS, t, c // HEADS).transpose(1, 2).reshape(b, t, c))


class Stack(nn.Module):
    """One of each."""

    def __init__(self):
        super().__init__()
        self.grouped, self.fused, self.batched = Grouped(), Fused(), Batched()

    def forward(self, x):
        x = x + self.grouped(x)
        x = x + self.grouped(x, torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1))
        return self.batched(x + self.fused(x))


def ids(step):
    return torch.randint(61, (4, TOKENS + 1), generator=torch.Generator().manual_seed(step))


def features(step):
    return torch.randn(4, TOKENS, WIDTH, generator=torch.Generator().manual_seed(step))


def images(step):
    return torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(step))


def hf_vit():
    from transformers import ViTConfig, ViTModel

    sizes = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": 1, "intermediate_size": 64}
    return ViTModel(ViTConfig(**sizes, image_size=8, patch_size=4, hidden_dropout_prob=0.0), add_pooling_layer=False)


MODELS = {
    "nanogpt": (lambda: GPT(GPTConfig(n_head=8, bias=True)), ids, lambda model, x: model(x[:, :-1], x[:, 1:])),
    "vit": (lambda: ViT(heads=8, depth=1), images, lambda model, x: model(x).square().mean()),
    "custom": (Stack, features, lambda model, x: model(x).square().mean()),
    "hf-vit": (
        hf_vit,
        images,
        lambda model, x: model(x[:, None].expand(-1, 3, 8, 8)).last_hidden_state.tanh().square().mean(),
    ),
}


def train_serial(name):
    """The oracle: losses, the first gradients, the last weights and state."""
    make, batch, loss_of = MODELS[name]
    serial_seed()
    serial = make()
    optimizer, losses, gradients = torch.optim.SGD(serial.parameters(), lr=0.1), [], None
    for step in range(3):
        loss = loss_of(serial, batch(step))
        loss.backward()
        losses.append(loss.item())
        gradients = gradients or gradients_of(serial)
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients, {key: value.detach() for key, value in serial.named_parameters()}, serial.state_dict()


def compare(comms, name):
    make, batch, loss_of = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        losses, gradients, weights, state = once(partial(train_serial, name))
    seed_apart(comms)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = axo.parallelize(make(), comms, plan="auto")
    what = f"{comms.grid} {name}"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, expected in enumerate(losses):
        found = loss_of(model, my_rows(comms, batch(step)))
        found.backward()
        mean = mean_over_data_ranks(comms, found)
        assert abs(mean - expected) <= LIMIT, f"{what}: loss {mean} is not {expected} at step {step}"
        if step == 0:
            assert_gradients_match(model, gradients, LIMIT, what)
        optimizer.step()
        optimizer.zero_grad()
    for key, whole in weights.items():
        mine = model.get_parameter(key)
        assert_close(axo.unshard(mine.detach(), mine.placement), whole, LIMIT, f"{what}: {key}")
    serial = make()
    serial.load_state_dict(state)
    rows = my_rows(comms, batch(9))
    with torch.no_grad():  # in evaluation, and of a copy
        expected = loss_of(serial.eval(), rows)
        for each in (model.eval(), copy.deepcopy(model)):
            assert_close(loss_of(each, rows), expected, LIMIT, what)
    return model.train()


def train(grids, names):
    for grid in grids:
        comms = axo.connect(grid)
        for name in names:
            report = axo.plan_report(compare(comms, name))
            by_heads = [line.name for line in report if line.why == "heads over x"]
            assert len(by_heads) == {"nanogpt": 4, "vit": 2, "custom": 0, "hf-vit": 4}[name], str(report)
        comms.close()


def test_training_equals_serial():
    run_ranks(train, 2, ["2x1x1x1", "1x2x1x1", "1x1x2x1"], ["nanogpt", "custom"], timeout=120)


def test_training_equals_serial_on_both_axes():
    run_ranks(train, 4, ["2x2x1x1"], list(MODELS), timeout=120, preload=("transformers.models.vit.modeling_vit",))


def count(grid):
    """All-reduces of features along x that a step issues: two for attention and two for the MLP of each block."""
    comms = axo.connect(grid)
    counts = []
    for layers in (1, 2, 3):
        seed_apart(comms)
        model = axo.parallelize(GPT(GPTConfig(n_layer=layers)), comms, plan="auto")
        MODELS["nanogpt"][2](model, ids(0)).backward()  # the first step also agrees on seeds
        with axo.count_collectives() as counted:
            MODELS["nanogpt"][2](model, ids(0)).backward()
        counts.append({key: value.calls for key, value in counted.items()})
    return [{key: after[key] - before[key] for key in after} for before, after in itertools.pairwise(counts)]


def test_an_attention_layer_costs_one_all_reduce_each_way():
    for steps in run_ranks(count, 2, "2x1x1x1"):
        for more in steps:
            assert {key: calls for key, calls in more.items() if calls} == {("all_reduce", "x"): 4}, more


def told(grid):
    """What the report says of an attention whose heads look at each other."""
    comms = axo.connect(grid)
    talking = Form(lambda self, x: x.softmax(1))
    model = nn.Sequential(OrderedDict(attn=talking, norm=nn.LayerNorm(WIDTH), attention=Batched()))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        axo.parallelize(model, comms, plan="auto")
    report = axo.plan_report(model)
    return [line.why for line in report], [str(one.message) for one in warned]


def test_the_report_says_why_attention_is_whole():
    known = "attn: the shares of its heads do not add up to the whole"
    unknown = "attention: no table of heads for Batched; one would save what these layers gather"
    for rank, (reasons, warned) in enumerate(run_ranks(told, 2, "2x1x1x1")):
        assert reasons == [f"attention not by heads: {why}" for why in (known, known, unknown, unknown)]
        assert warned == [f"parallelize: attention is not split by heads: {known}"][rank:]


def late(self, x):
    return F.dropout(x, 0.3, self.training)


def drop(grid):
    """What attention gives whose heads are dropped, and what it gives itself: by a module, and by a function."""
    comms = axo.connect(grid)
    seed_apart(comms)
    model = axo.parallelize(GPT(GPTConfig(n_layer=1, dropout=0.3)), comms, plan="auto")
    seen = {}
    model.h[0].attn.register_forward_hook(lambda module, args, out: seen.update(out=out.detach()))
    model.h[0].attn.c_proj.register_forward_pre_hook(lambda module, args: seen.update(heads=args[0].detach()))
    form = axo.parallelize(nn.Sequential(Form(lambda self, x: F.dropout(x, 0.3, self.training), late)), comms, "auto")
    assert axo.plan_report(form)["0.proj"].why == "heads over x"
    with torch.no_grad():
        model.h[0].attn.c_attn.weight.zero_()
        model(ids(0)[:, :-1])
        outputs = form(features(0)), form(features(0))
    assert (outputs[0] == 0).float().mean() > 0.2 and not torch.equal(*outputs)
    return seen["out"], outputs, seen["heads"].isfinite().all().item()


def test_dropout_after_the_last_projection_agrees_along_x():
    (first, drops, _), (second, others, finite) = run_ranks(drop, 2, "2x1x1x1")
    assert torch.equal(first, second) and finite
    assert all(map(torch.equal, drops, others))


def compiled(grid, name):
    """Losses and gradients without and with a compiler, of the call that docs/plans.md names."""
    from axo.integrations.fabric.compile import keep_out_of_graphs

    comms = axo.connect(grid)
    seed_apart(comms)
    make, batch, loss_of = MODELS[name]
    model = axo.parallelize(make(), comms, plan="auto")
    keep_out_of_graphs(model)
    found = []
    for each in (model, torch.compile(model, backend="aot_eager")):
        model.zero_grad()
        losses = [loss_of(each, my_rows(comms, batch(step))) for step in range(2)]
        sum(losses).backward()
        found.append(([loss.item() for loss in losses], [p.grad.clone() for p in model.parameters()]))
    return found


@pytest.mark.soak
@pytest.mark.parametrize("name", ["nanogpt", "custom"])
def test_a_compiled_model_equals_an_eager_one(name):
    for (losses, gradients), (others, compiled_gradients) in run_ranks(compiled, 2, "2x1x1x1", name, timeout=200):
        assert others == pytest.approx(losses, rel=1e-6)
        for gradient, other in zip(gradients, compiled_gradients, strict=True):
            assert_close(other, gradient, LIMIT, "a gradient")


class Form(nn.Module):
    """A ViT's attention with something between scores and values, and something after the last projection."""

    def __init__(self, between, after=lambda self, x: x):
        super().__init__()
        self.heads, self.between, self.after = HEADS, between, after
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        scores = self.between(self, (q @ k.transpose(2, 3)).softmax(-1))
        return self.after(self, self.proj((scores @ v).transpose(1, 2).reshape(b, t, c)))


class Masked(Form):
    """It may be given a mask, of which nobody knows whether it is one for each head."""

    def forward(self, x, mask=None):
        return super().forward(x)


def plain(self, x):
    return x


def with_slopes():
    """A parameter of which each head has its part."""
    module = Form(lambda self, x: x * self.slopes)
    module.slopes = nn.Parameter(torch.ones(HEADS, 1, 1))
    return module


def hooked():
    module = Form(plain)
    module.drop = nn.Dropout()
    module.drop.register_forward_hook(lambda *_: None)
    return module


ADD_UP = "the shares of its heads do not add up to the whole"
RUN = "its forward cannot run on some of its heads: "
TRACED = "its forward cannot be traced (control flow on values)"
REASONS = {
    "softmax over heads": (lambda: Form(lambda self, x: x.softmax(1)), ADD_UP),
    "mean of heads": (lambda: Form(lambda self, x: x - x.mean(1, keepdim=True)), ADD_UP),
    "large scores": (lambda: Form(lambda self, x: x + x.sub(0.95).relu().sum(1, keepdim=True)), ADD_UP),
    "order of heads": (lambda: Form(lambda self, x: x.flip(1)), ADD_UP),
    "neighbours": (lambda: Form(lambda self, x: torch.cat((x[:, 1:], x[:, :1]), 1)), ADD_UP),
    "in training": (lambda: Form(lambda self, x: x.softmax(1) if self.training else x), ADD_UP),
    "numbers of heads": (lambda: Form(lambda self, x: x[:, torch.arange(HEADS)]), f"{RUN}IndexError"),
    "a width of its own": (lambda: Form(plain, lambda self, x: x + self.qkv.weight.new_ones(WIDTH)), ADD_UP),
    "input": (lambda: Form(lambda self, x: x if x.sum() > 0 else -x), TRACED),
    "mask": (lambda: Masked(plain), "its forward takes more than one tensor"),
    "hooks": (hooked, "hooks see its activations"),
    "slopes": (with_slopes, "no table says how heads share its parameter slopes"),
}


def split(module, ranks=2):
    parts = [part for part in module.modules() if type(part) is nn.Linear]
    linear = {part: SplitCandidate("", part, "linear", part.in_features, part.out_features) for part in parts}
    return Splitter(ranks, linear).split(module, "attn")


@pytest.mark.parametrize("what", REASONS)
def test_a_form_that_mixes_heads_stays_whole(what):
    """Oracle: the whole module beside the sum of its shares, by hand for the form that is split."""
    make, reason = REASONS[what]
    with pytest.raises(ValueError) as error:
        split(make())
    assert str(error.value).startswith(f"attn: {reason}"), error.value


@pytest.mark.parametrize(
    "between",
    [
        plain,
        lambda self, x: setattr(self, "seen", x) or x,
        lambda self, x: F.dropout(x, 0.5, self.training),
        late,
        lambda self, x: x.masked_fill(torch.ones(x.shape[-2:]).triu(1).bool(), 0),
    ],
)
def test_a_form_that_keeps_heads_apart_is_split(between):
    module, state = Form(between), torch.get_rng_state()
    attention = split(module, 4)
    assert attention.layers == {"qkv": ("normal", {"out_blocks": (WIDTH,) * 3}), "proj": ("transposed", {})}
    assert attention.attributes == {"heads": HEADS // 4}
    assert not hasattr(module, "seen") and torch.equal(state, torch.get_rng_state()), "the trial left a trace"


def test_heads_that_do_not_divide_say_so():
    module = CausalSelfAttention(GPTConfig(n_head=4))
    with pytest.raises(ValueError, match="attn: query heads=4 does not divide over x=8"):
        split(module, 8)
    assert split(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))) is None
