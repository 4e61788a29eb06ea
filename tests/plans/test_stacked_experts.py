"""Experts whose weights lie in one tensor, as transformers keeps them since 5. Oracle: the serial module, a loop.

The class here has what those of transformers 5 have, so that it runs with transformers 4 too; theirs: test_experts.
"""

import contextlib
import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import axo
from axo.comm.recording import recording
from axo.matmul import cost, grouped
from axo.matmul.grouped import RowTransfer
from axo.nn.experts import spread_experts
from axo.plans.auto.stacked_experts import StackedExperts
from tests.launcher import run_ranks
from tests.nn.support import (
    assert_close,
    assert_counted,
    assert_gradients_match,
    gradients_of,
    mean_over_data_ranks,
    my_rows,
    once,
    serial_seed,
)

HIDDEN, WIDTH, EXPERTS = 12, 20, 8


class Experts(nn.Module):
    """Transformers' own loop; without a gate as Nemotron's."""

    has_bias = is_transposed = has_post_expert_norm = False
    is_concatenated = True

    def __init__(self, has_gate=True, count=EXPERTS):
        super().__init__()
        self.has_gate, self.act_fn = has_gate, nn.SiLU()
        name, rows = ("gate_up_proj", 2 * WIDTH) if has_gate else ("up_proj", WIDTH)
        self.register_parameter(name, nn.Parameter(torch.randn(count, rows, HIDDEN) * 0.2))
        self.down_proj = nn.Parameter(torch.randn(count, HIDDEN, WIDTH) * 0.2)

    def _apply_gate(self, wide):
        gate, up = wide.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def forward(self, hidden_states, top_k_index, top_k_weights):
        output = torch.zeros_like(hidden_states)
        first = self.gate_up_proj if self.has_gate else self.up_proj
        for number in range(len(first)):
            row, place = torch.where(top_k_index == number)
            wide = F.linear(hidden_states[row], first[number])
            inner = F.linear(self._apply_gate(wide) if self.has_gate else self.act_fn(wide), self.down_proj[number])
            output = output.index_add(0, row, (inner * top_k_weights[row, place, None]).to(output.dtype))
        return output


Experts.__module__ = "transformers.models.of_these_tests"


class Mixture(nn.Module):
    def __init__(self, has_gate=True):
        super().__init__()
        self.gate, self.experts = nn.Linear(HIDDEN, EXPERTS, bias=False), Experts(has_gate)

    def forward(self, hidden):
        rows = hidden.reshape(-1, HIDDEN)
        weights, choices = self.gate(rows).float().softmax(-1).topk(2)
        return hidden + self.experts(rows, choices, weights).view_as(hidden)


class Model(nn.Module):
    def __init__(self, has_gate=True):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, HIDDEN), nn.Linear(HIDDEN, 50)
        self.blocks = nn.ModuleList(Mixture(has_gate) for _ in range(2))
        self.recomputes = False

    def forward(self, ids):
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.recomputes else block(hidden)
        return self.head(hidden)


def serial_model(has_gate=True):
    serial_seed()
    model = Model(has_gate)
    with torch.no_grad():
        for block in model.blocks:
            block.gate.weight.normal_()
    return model


def batch(step):
    ids = torch.randint(50, (8, 7), generator=torch.Generator().manual_seed(step))
    return ids[:, :-1], ids[:, 1:]


def losses_of(model, rows_of, clip, steps, autocast):
    """Losses of some steps of AdamW, and the gradients of the first."""
    optimizer, losses, gradients = torch.optim.AdamW(model.parameters(), lr=1e-2), [], None
    for step in range(steps):
        ids, targets = map(rows_of, batch(step))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model(ids)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.detach())
        if gradients is None:
            yield (gradients := gradients_of(model))
        clip(model.parameters(), 1.0)
        optimizer.step()
    yield torch.stack(losses), {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def mean_of_step(model, optimizer, comms, step):
    """One step on this rank's rows; the mean of all ranks' losses."""
    ids, targets = (my_rows(comms, part) for part in batch(step))
    loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    axo.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return torch.tensor(mean_over_data_ranks(comms, loss))


def serial_run(has_gate, autocast, steps):
    return list(losses_of(serial_model(has_gate), lambda rows: rows, torch.nn.utils.clip_grad_norm_, steps, autocast))


def trained(cases, steps):
    for grid, experts, changes in cases:
        how = {"has_gate": True, "autocast": False, "recomputes": False, "zero": 0, "cache": "all"} | changes
        what = f"{grid} over {experts}, {changes}"
        gradients, (losses, state) = once(partial(serial_run, how["has_gate"], how["autocast"], steps))
        with axo.connect(grid, experts=experts) as comms:
            model = serial_model(how["has_gate"])
            axo.parallelize(model, comms, plan="auto", zero=how["zero"], gather_cache=how["cache"])
            assert all(isinstance(block.experts, StackedExperts) for block in model.blocks)
            model.recomputes = how["recomputes"]
            run = losses_of(model, partial(my_rows, comms), axo.clip_grad_norm_, steps, how["autocast"])
            next(run)
            if not how["autocast"] and how["zero"] < 2:
                assert_gradients_match(model, gradients, 1e-5, what)
            mine, weights = next(run)
            means = torch.tensor([mean_over_data_ranks(comms, each) for each in mine])
            # in bf16 a sum in another order may be another number, and a token go to another expert
            assert_close(means, losses, 2e-2 if how["autocast"] else 1e-4, what)
            assert list(weights) == list(state)
            for name, whole in () if how["autocast"] else state.items():
                assert_close(weights[name], whole, 1e-4, f"{what}: {name} after {steps} steps")


def test_equal_to_serial_on_each_axis():
    cases = [("2x1x1x1", 1, {}), ("1x2x1x1", 1, {"has_gate": False}), ("1x1x2x1", 1, {"cache": "none"}),
             ("1x1x2x1", 2, {}), ("1x1x1x2", 2, {"has_gate": False, "recomputes": True})]  # fmt: skip
    run_ranks(trained, 2, cases, 3, timeout=120)


def test_twenty_losses_equal_serial():
    cases = [
        ("2x2x2x1", 1, {"cache": "none", "recomputes": True}),
        ("1x1x8x1", 2, {"recomputes": True}),  # 160 rows of four experts over 4 ranks
        ("2x1x2x2", 2, {"zero": 2}),
        ("1x2x2x2", 4, {}),
        ("1x1x8x1", 1, {"zero": 1, "has_gate": False}),
        ("1x1x4x2", 8, {"autocast": True, "recomputes": True}),
    ]
    run_ranks(trained, 8, cases, 20, timeout=240)


def few_tokens(cases):
    """One token a rank, and none on one: most experts have none; a copy, and no_sync."""
    for grid, experts in cases:
        with axo.connect(grid, experts=experts) as comms:
            model, serial = axo.parallelize(serial_model(), comms, plan="auto"), serial_model()
            ids = [torch.arange(rank != 2).view(-1, 1) + rank for rank in range(comms.data_ranks)]
            serial(torch.cat(ids)).logsumexp(-1).mean().backward()
            mine = ids[comms.data_rank]
            copied = copy.deepcopy(model)
            assert copied.blocks[0].experts.spread_experts.experts[0] is copied.blocks[0].experts
            assert torch.equal(copied(mine), model(mine))
            weight = axo.token_weight(mine.numel(), comms) / 2
            with axo.no_sync(model):
                (model(mine).logsumexp(-1).nan_to_num().sum() / max(1, mine.numel()) * weight).backward()
            (model(mine).logsumexp(-1).nan_to_num().sum() / max(1, mine.numel()) * weight).backward()
            assert_gradients_match(model, serial, 1e-5, f"{grid} over {experts}")


def test_experts_without_tokens():
    run_ranks(few_tokens, 4, [("1x1x4x1", 4), ("2x1x2x1", 1), ("1x1x2x2", 2)], timeout=60)


def counted(cases):
    """Oracle: ``cost()``. One gather of a weight, whatever the number of experts."""
    for grid, experts, axis in cases:
        with axo.connect(grid, experts=experts) as comms:
            model = axo.parallelize(serial_model(), comms, plan="auto", overlap=axo.Overlap(bucket_bytes=0))
            layer = model.blocks[0].experts
            generator = torch.Generator().manual_seed(comms.data_rank)
            rows = torch.randn(5 + comms.data_rank, HIDDEN, generator=generator).requires_grad_()
            choices = torch.rand(len(rows), EXPERTS, generator=generator).topk(2).indices
            weights = torch.rand(len(rows), 2, generator=generator).requires_grad_()
            with axo.count_collectives() as counts:
                layer(rows, choices, weights).sum().backward()
            chosen = comms.experts.all_reduce(layer.spread_experts.chosen.clone()).view(experts, -1)
            mine, halves = chosen[comms.experts.rank].tolist(), layer.spread_experts._halves
            received = [sum(mine[number] for number in half) for half in halves]
            calls = layer.cost(received)
            gathers = [call for call in calls if call.op == "all_gather"]
            assert len(gathers) == (2 if comms.grid.z > min(experts, comms.grid.z) else 0)
            if experts > 1:
                part = HIDDEN // comms.grid.y
                calls += cost.experts(2 * len(rows), part, EXPERTS, ranks=experts, axis=axis, received=sum(mine))
            if comms.grid.y > 1:  # outputs gathered, and the gradient of the input; of the weights summed
                calls += [cost.Call("", "all_gather", "y", len(rows) * HIDDEN // comms.grid.y, 4, "")] * 2
                calls.append(cost.Call("", "all_reduce", "y", weights.numel(), 4, ""))
            assert_counted(counts, [call for call in calls if comms.grid.size(call.axis) > 1])


def test_bytes_equal_cost():
    cases = [("2x2x2x1", 1, "z"), ("2x2x2x1", 2, "z"), ("1x1x4x2", 2, "z"), ("1x2x1x4", 4, "data")]
    run_ranks(counted, 8, cases, timeout=60)


def one_half_behind_the_other():
    """Order: both halves are on their way before one is multiplied; what the first gives is before the second's last
    product. Backward: gradients of weights are computed behind those of rows that are on their way."""
    with axo.connect("1x1x2x1", experts=2) as comms:
        calls, layer = [], axo.parallelize(serial_model(), comms, plan="auto").blocks[0].experts
        rows = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(comms.rank)).requires_grad_()
        choices, weights = torch.arange(18).view(9, 2) % EXPERTS, torch.ones(9, 2)
        with pytest.MonkeyPatch.context() as patch:
            for owner, name, what in (
                (RowTransfer, "_start", "start"), (RowTransfer, "wait", "wait"), (grouped, "product", "product"),
                (grouped, "weight_product", "weights"),
            ):  # fmt: skip
                plain = getattr(owner, name)
                called = lambda *args, plain=plain, what=what: (calls.append(what), plain(*args))[1]  # noqa: E731
                patch.setattr(owner, name, called)
            output = layer(rows, choices, weights)
            both, piece = ["start", "start"], ["wait", "product"]
            assert calls == [*both, *piece, *piece, "product", "start", "product", "start", "wait", "wait"], calls
            calls.clear()
            output.square().sum().backward()
        down = ["wait", "wait", "product", "weights"]
        assert calls == [*both, *down, "product", "start", "product", "start", "weights", "wait", "wait"], calls


def test_one_half_travels_behind_the_products_of_the_other():
    run_ranks(one_half_behind_the_other, 2, timeout=60)


def moved(folder, cases):
    """Weights and AdamW's state go from one grid to another: the next steps are the serial ones, the names too."""
    for number, (before, after) in enumerate(cases):
        path, (_, (losses, _)) = f"{folder}/{number}", once(partial(serial_run, True, False, 4))
        for (grid, experts), steps in ((before, range(2)), (after, range(2, 4))):
            with axo.connect(grid, experts=experts) as comms:
                model = serial_model()
                if steps.start:
                    torch.nn.init.zeros_(model.blocks[0].experts.gate_up_proj)
                axo.parallelize(model, comms, plan="auto")
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
                if steps.start:
                    axo.checkpoint.load(path, model, optimizer)
                for step in steps:
                    mean = mean_of_step(model, optimizer, comms, step)
                    assert_close(mean, losses[step], 1e-4, f"{grid} over {experts}: step {step}")
                if not steps.start:
                    axo.checkpoint.save(path, model, optimizer, step=2)
                    state = model.state_dict()
                    if comms.rank == 0:
                        axo.checkpoint.consolidate(path, f"{path}.pth")
                        whole = torch.load(f"{path}.pth")
                        whole = whole.get("model", whole)
                        assert {name: part.shape for name, part in whole.items()} == {
                            name: part.shape for name, part in serial_model().state_dict().items()
                        }
                        assert all(torch.equal(whole[name], state[name]) for name in whole)
                    model.load_state_dict({name: part + 1 for name, part in state.items()})
                    assert all(torch.equal(part, state[name] + 1) for name, part in model.state_dict().items())


def test_checkpoints_load_on_any_grid(tmp_path):
    cases = [(("1x1x4x1", 4), ("2x1x2x1", 1)), (("1x2x2x1", 1), ("1x1x2x2", 4))]
    run_ranks(moved, 4, str(tmp_path), cases, timeout=120)


def regridded():
    """Four steps, the last two on other grids; then a meta model that ``init_weights`` fills."""
    _, (losses, state) = once(partial(serial_run, True, False, 4))
    comms = axo.connect("2x1x2x1")
    model = axo.parallelize(serial_model(), comms, plan="auto")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step, grid in enumerate((None, None, "1x2x1x2", "1x1x4x1")):
        if grid:
            axo.regrid(model, optimizer, grid)
        assert_close(mean_of_step(model, optimizer, comms, step), losses[step], 1e-4, f"step {step}")
    for name, tensor in model.state_dict().items():
        assert_close(tensor, state[name], 1e-4, name)
    comms.close()
    for grid, experts in (("2x1x2x1", 1), ("1x2x2x1", 2)):
        with axo.connect(grid, experts=experts) as comms:
            with torch.device("meta"):
                empty = Model()
            axo.parallelize(empty, comms, plan="auto")
            torch.manual_seed(7)
            axo.init_weights(empty, drawn)
            serial = Model()
            torch.manual_seed(7)
            serial.apply(drawn)
            for name, tensor in empty.state_dict().items():
                assert torch.equal(tensor, serial.state_dict()[name]), f"{grid}: {name}"


def regridded_whole(grid, width, to):
    """A step before and one after a move between grids of which one cannot split the experts."""
    globals()["WIDTH"] = width
    serial, comms = serial_model(), axo.connect(grid)
    model = axo.parallelize(serial_model(), comms, plan="auto")
    kinds, optimizers = (
        [type(model.blocks[0].experts)],
        [torch.optim.AdamW(m.parameters(), 1e-2) for m in (model, serial)],
    )
    for step in range(2):
        if step:
            axo.regrid(model, optimizers[0], to)
        for each, optimizer, rows_of in zip(
            (model, serial), optimizers, (partial(my_rows, comms), lambda rows: rows), strict=True
        ):
            ids, targets = map(rows_of, batch(step))
            optimizer.zero_grad()
            F.cross_entropy(each(ids).flatten(0, 1), targets.flatten()).backward()
            optimizer.step()
    for name, tensor in model.state_dict().items():
        assert_close(tensor, serial.state_dict()[name], 1e-4, name)
    return [*kinds, type(model.blocks[0].experts)].count(StackedExperts)


@pytest.mark.parametrize(("grid", "to"), [("1x2x1x1", "2x1x1x1"), ("2x1x1x1", "1x2x1x1")])
def test_stacks_become_whole_and_whole_ones_stacks(grid, to):
    assert run_ranks(regridded_whole, 2, grid, 21, to) == [1, 1]


def drawn(module):
    for parameter in module.parameters(recurse=False):
        nn.init.normal_(parameter, std=0.1)


def test_move_to_other_grids_and_first_values():
    run_ranks(regridded, 4, timeout=120)


def refusals():
    with axo.connect("1x1x2x1", experts=2) as comms:
        with pytest.raises(axo.Refused, match="experts=2 ranks do not divide the 3 experts of 'experts'; use one of 1"):
            axo.parallelize(nn.ModuleDict({"experts": Experts(count=3)}), comms, plan="auto")
        biased = Model()
        for block in biased.blocks:
            block.experts.has_bias = True
        with pytest.raises(axo.Refused, match="is of models that have experts, each a module of its own or all in one"):
            axo.parallelize(biased, comms, plan="auto")
        model = axo.parallelize(serial_model(), comms, plan="auto")
        weight = model.blocks[0].experts.down_proj
        groups = axo.optim.muon_groups(model)
        assert not any(each is weight for each in groups[0]["params"]), "no matrix to the serial program either"
        with pytest.raises(axo.Refused, match="Muon: experts in one tensor"):
            axo.optim.Muon([weight])
        with pytest.raises(ValueError, match="a tensor of experts is not a DTensor"):
            axo.to_dtensor(weight)
    with axo.connect("2x1x1x1") as comms:
        odd = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), Experts())
        odd[1].down_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 21))
        odd[1].gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 42, HIDDEN))
        with pytest.warns(UserWarning, match="stay serial") if comms.rank == 0 else contextlib.nullcontext():
            axo.parallelize(odd, comms, plan="auto")
        assert "x=2 does not divide the width 21" in axo.plan_report(odd)["1"].why
        hooked = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), Experts())
        hooked[1].down_proj.register_hook(lambda grad: grad)
        with pytest.raises(axo.Refused, match="Experts '1': its down_proj has gradient hooks"):
            axo.parallelize(hooked, comms, plan="auto")
        assert type(hooked[0]) is nn.Linear, "nothing has changed"
        tied = nn.Sequential(Experts(), Experts())
        tied[1].down_proj = tied[0].down_proj
        with pytest.raises(axo.Refused, match="experts '0' share a weight with another module"):
            axo.parallelize(tied, comms, plan="auto")
        twice = serial_model()
        twice.blocks[1].experts = twice.blocks[0].experts
        axo.parallelize(twice, comms, plan="auto")
        assert isinstance(twice.blocks[1].experts, StackedExperts)
        assert twice.blocks[1].experts is twice.blocks[0].experts
        experts = axo.parallelize(nn.Sequential(Experts()), comms, plan="auto")[0]
        with pytest.raises(RuntimeError, match="and the weight torch"):
            experts(torch.randn(3, HIDDEN).bfloat16(), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))


def test_refusals():
    run_ranks(refusals, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("sizes", [(3, 0, 7, 1), (0, 0, 0, 0), (11, 0, 0, 0)])
@pytest.mark.parametrize(("n", "k"), [(24, 40), (9, 5)])
def test_grouped_products_equal_a_loop(dtype, sizes, n, k):
    generator = torch.Generator().manual_seed(0)
    rows, grad = (torch.randint(-3, 4, (sum(sizes), size), generator=generator).to(dtype) for size in (k, n))
    weights = torch.randint(-3, 4, (4, n, k), generator=generator).to(dtype)
    each = list(zip(rows.split(sizes), grad.split(sizes), weights, strict=True))
    assert torch.equal(
        grouped.product(rows, weights, sizes), torch.cat([part @ weight.t() for part, _, weight in each])
    )
    back = grouped.product(grad, weights.transpose(1, 2), sizes)
    assert torch.equal(back, torch.cat([part @ weight for _, part, weight in each]))
    out = torch.full_like(weights, torch.nan)
    grouped.weight_product(grad, rows, sizes, out)
    assert torch.equal(out, torch.stack([of_results.t() @ part for part, of_results, _ in each]))


def test_spread_mixtures_are_found():
    comms = recording("1x1x4x1", 0, experts=4)
    model = axo.parallelize(serial_model(), comms, plan="auto")
    assert [len(each.experts) for each in spread_experts(model)] == [EXPERTS, EXPERTS]
