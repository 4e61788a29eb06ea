"""What users write in modules of their own: plan "auto" gives the serial result, or says what it cannot do.

Oracle: the module itself before ``parallelize``, all rows on one rank.
"""

import contextlib
import random
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import axo
from axo.plans.auto import agreement
from tests.launcher import run_ranks
from tests.nn.support import assert_close, serial_seed


class InPlace(nn.Module):
    """Operations in place on what layers return, whole and split."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        h = self.a(x)
        h += x
        h = self.b(h.relu_())
        h *= 2
        return self.c(h)


class Convolutions(nn.Module):
    """As in torchvision: ReLU in place, and a view that wants contiguous memory."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(inplace=True), nn.MaxPool2d(1))
        self.side, self.norm = nn.Conv2d(4, 8, 3), nn.GroupNorm(2, 8)
        self.head = nn.Sequential(nn.Linear(8 * 4 * 4, 12), nn.ReLU(inplace=True), nn.Linear(12, 4))

    def forward(self, x):
        h = self.norm(self.side(x)).add_(self.stem(x))
        h = torch.cat([h[:, :4], self.side(x).view(x.shape[0], 8, -1).view(h.shape)[:, 4:]], 1)
        return self.head(h.view(x.shape[0], -1))


class Aliases(nn.Module):
    """One layer under two names, used by the second."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)})
        self.up = self.layers["up"]

    def forward(self, x):
        return self.layers["down"](self.up(x))


class Hooked(nn.Module):
    """A hook that changes what a layer returns, and one that is removed later."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.a.register_forward_hook(lambda module, args, output: output.cumsum(-1))
        self.b.register_forward_pre_hook(lambda module, args: (args[0].flip(-1),))
        self.b.register_full_backward_hook(lambda module, grads, _: (grads[0].cumsum(-1),))

    def forward(self, x):
        return self.b(self.a(x))


class ReadsWeights(nn.Module):
    """A head that is tied by hand."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return F.linear(self.b(self.a(x)), self.a.weight)


class OldWeightNorm(nn.Module):
    def __init__(self):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.a = nn.utils.weight_norm(nn.Linear(8, 8))
        self.b = nn.Linear(8, 8)

    def forward(self, x):
        return self.b(self.a(x))


class Codes(nn.Module):
    """Quantized: frozen parameters of integers and booleans, in modules of one's own and in torch's."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
        self.b.weight = nn.Parameter((40 * self.b.weight.data).to(torch.int8), requires_grad=False)
        self.codes = nn.Parameter((40 * torch.randn(8, 8)).to(torch.int8), requires_grad=False)
        self.scale, self.keep = nn.Parameter(torch.rand(8)), nn.Parameter(torch.arange(8) % 3 > 0, requires_grad=False)
        self.register_buffer("order", torch.arange(8).to(torch.uint16))  # no collective knows it

    def forward(self, x):
        x = F.linear(self.a(x)[:, self.order.long()], self.codes.to(x.dtype) * self.scale[:, None] / 40)
        return self.c(F.linear(x, self.b.weight.to(x.dtype) / 40).masked_fill(~self.keep, 0))


class Spectral(nn.Module):
    """A complex weight."""

    def __init__(self):
        super().__init__()
        self.a, self.filter = nn.Linear(8, 8), nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(self.a(x)) * self.filter, 8)


MODULES = (InPlace, Convolutions, Aliases, Hooked, ReadsWeights, OldWeightNorm, Codes)


def compare(grid):
    comms = axo.connect(grid)
    warnings.simplefilter("ignore")
    rows, row = comms.grid.z * comms.grid.data, comms.coords.z + comms.grid.z * comms.coords.data
    for make in MODULES:
        serial_seed()
        serial = make()
        serial_seed()
        model = axo.parallelize(make(), comms, plan="auto")
        x = torch.randn(8, 4, 6, 6) if make is Convolutions else torch.randn(8, 8)
        for step in range(2):
            expected, given = serial(x), model(x.chunk(rows)[row])
            assert_close(given, expected.chunk(rows)[row], 1e-5, f"{make.__name__} {step}")
            expected.square().sum(1).mean().backward()
            given.square().sum(1).mean().backward()
            theirs = dict(serial.named_parameters(remove_duplicate=False))
            for name, parameter in model.named_parameters(remove_duplicate=False):
                if not parameter.requires_grad:
                    assert torch.equal(axo.unshard(parameter, parameter.placement), theirs[name]), name
                    continue
                grad = axo.shard(theirs[name].grad, parameter.placement)
                assert_close(parameter.grad, grad, 1e-5, f"{make.__name__} {name} {step}")
            for module in (serial, model):
                torch.optim.SGD(module.parameters(), lr=0.01).step()
                module.zero_grad()
    shown = {line.name: line.why for line in axo.plan_report(axo.parallelize(ReadsWeights(), comms, plan="auto"))}
    assert "reads its weight itself" in shown["a"] and shown["b"].startswith("whole"), shown

    hooked = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    seen = []
    handle = hooked[0].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    hooked = axo.parallelize(hooked, comms, plan="auto")
    hooked(torch.randn(2, 8))
    handle.remove()
    hooked(torch.randn(2, 8))
    assert seen == [(2, 8)], seen
    hooked = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    hooked[1].weight.register_hook(lambda grad: grad)
    with pytest.raises(ValueError, match=r"Linear '1': its weight has gradient hooks.*after parallelize"):
        axo.parallelize(hooked, comms, plan="auto")
    assert type(hooked) is nn.Sequential and all(type(layer) is nn.Linear for layer in hooked), "nothing has changed"
    spectral, refused = (
        Spectral(),
        pytest.raises(axo.Refused, match=r"'filter' is torch\.complex64, whose gradients are n"),
    )
    with refused if rows > 1 else contextlib.nullcontext():
        axo.parallelize(spectral, comms, plan="auto")(torch.randn(2, 8)).sum().backward()
    assert (type(spectral) is Spectral and type(spectral.a) is nn.Linear) == (rows > 1), "nothing has changed"
    sparse = nn.Sequential(nn.Linear(8, 8))
    sparse.register_buffer("edges", torch.eye(3).to_sparse())
    with pytest.raises(axo.Refused, match=r"'edges' is torch\.sparse_coo"):
        axo.parallelize(sparse, comms, plan="auto")
    assert type(sparse[0]) is nn.Linear, "nothing has changed"
    for wrong, why in (
        (
            nn.Parameter(torch.eye(8).to_sparse(), requires_grad=False),
            r"'1\.weight' is torch\.sparse_coo; keep it dense",
        ),
        (nn.UninitializedParameter(), r"'1\.weight' has no shape yet; call the model once"),
    ):
        odd = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        odd[1].weight = wrong
        with pytest.raises(axo.Refused, match=why):
            axo.parallelize(odd, comms, plan="auto")
        assert type(odd[0]) is nn.Linear, "nothing has changed"


class Counts(nn.Module):
    """State that forward changes: a buffer in place, an attribute, a list."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.calls, self.kept = 0, []

    def forward(self, x):
        self.seen += 1
        self.calls += 1
        x = self.b(torch.relu(self.a(x)))
        self.kept.append(x)
        return x


class SkipsExperts(nn.Module):
    """A mixture of experts that calls those only that some row here has chosen."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        chosen, y = (x[:, 0] > 0).long(), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if rows.numel():
                y = y.index_add(0, rows, expert(x[rows]))
        return y


class KeepsMean(SkipsExperts):
    """Calls all of them, and keeps a mean of its own rows."""

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.mean(0), 0.5)
        return sum(expert(x - self.mean) for expert in self.experts)


def by_rows(grid):
    """What depends on the rows of a rank: refused before, or in the first step, or told."""
    comms = axo.connect(grid)
    parts = comms.grid.z * comms.grid.data
    counts = axo.parallelize(Counts(), comms, plan="auto")
    assert (counts.seen.item(), counts.calls, counts.kept) == (0, 0, []), "tracing leaves its traces"
    counts(torch.ones(2, 8))
    assert (counts.seen.item(), counts.calls, len(counts.kept)) == (1, 1, 1)

    x = axo.shard_batch(torch.tensor([[-1.0], [1.0]]).repeat_interleave(4, 0).expand(8, 8), comms)
    for by_closure in (False, True):
        model = axo.parallelize(SkipsExperts(), comms, plan="auto")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def loss(model=model):
            value = model(x).square().sum()
            value.backward()
            return value

        before = [p.detach().clone() for p in model.parameters()]
        with (
            pytest.raises(RuntimeError, match=r"gradients of other parameters than rank 0.*call a layer that no row")
            if parts > 1
            else contextlib.nullcontext()
        ):
            optimizer.step(loss) if by_closure else (loss(), optimizer.step())
        same = [torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
        assert all(same) if parts > 1 else not any(same)

    model = axo.parallelize(KeepsMean(), comms, plan="auto")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            model(x).square().sum().backward()
            optimizer.step()
    assert [str(each.message)[:44] for each in told] == ["axo: buffers differ between ranks: mean; the"] * (
        parts > 1 and comms.rank == 0
    )

    for module, what in (
        (nn.InstanceNorm2d(4, track_running_stats=True), "InstanceNorm2d, whose running statistics would be"),
        (nn.Embedding(8, 4, max_norm=1.0), "Embedding, whose max_norm would cut"),
        (nn.EmbeddingBag(8, 4, max_norm=1.0), "EmbeddingBag, whose max_norm would cut"),
        (nn.Embedding(8, 4, scale_grad_by_freq=True), "Embedding, whose scale_grad_by_freq would count"),
        (nn.Embedding(8, 4, sparse=True), "Embedding, whose sparse=True gives"),
    ):
        with (
            warnings.catch_warnings(),
            pytest.raises(axo.Refused, match=f"'0' is a {what}.* on z=") if parts > 1 else contextlib.nullcontext(),
        ):
            warnings.simplefilter("ignore")
            axo.parallelize(nn.Sequential(module), comms, plan="auto")


class Draws(nn.Module):
    """Calls one of two layers; traced, it seems to have one way."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.a(x) if random.random() < 0.5 else self.b(x)


def other_draws_and_buffers():
    comms = axo.connect("1x1x1x2")
    before = random.getstate()
    model = axo.parallelize(Draws(), comms, plan="auto")
    assert random.getstate() == before, "tracing left a trace"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random, "random", lambda: float(comms.rank))
        model(torch.ones(2, 8)).sum().backward()
    with pytest.raises(RuntimeError, match="gradients of other parameters than rank 0"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    model = axo.parallelize(nn.Sequential(nn.Linear(8, 8)), comms, plan="auto")
    if comms.rank:
        model.register_buffer("mine", torch.ones(1))
    model(torch.ones(2, 8)).sum().backward()
    told = pytest.warns(UserWarning, match="buffers differ between ranks: their names")
    with told if comms.rank == 0 else contextlib.nullcontext():
        torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_draws_that_choose_layers_and_buffers_of_one_rank_are_found():
    run_ranks(other_draws_and_buffers, 2)


@pytest.mark.parametrize(("device", "always", "compared"), [("cpu", "0", 6), ("cuda", "0", 2), ("cuda", "1", 6)])
def test_gpus_compare_before_the_first_step_only(monkeypatch, device, always, compared):
    """Counted are comparisons: layers before each of five steps, or the first, and buffers once."""
    asked = []
    monkeypatch.setenv("AXO_CHECK", always)
    monkeypatch.setattr(agreement, "ranks_that_differ", lambda comms, text: asked.append(text))
    model = nn.Linear(8, 8)
    agreement.AgreementCheck(SimpleNamespace(device=torch.device(device)), layers=True).watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.step()
    assert len(asked) == compared


@pytest.mark.parametrize("grid", ["2x1x1x1", "1x1x2x1", "1x1x1x2"])
def test_what_depends_on_the_rows_of_a_rank_is_not_silent(grid):
    run_ranks(by_rows, 2, grid)


@pytest.mark.parametrize("grid", ["2x2x1x1", "2x1x1x2"])
def test_modules_of_users_train_as_before(grid):
    run_ranks(compare, 4, grid)
