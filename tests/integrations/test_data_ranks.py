"""Frameworks that take each rank for a data rank: what they ask for, on grids of each axis, against one device."""

import itertools
import os
import re
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import axo
from axo.integrations import data_ranks
from tests.integrations.support import ELASTIC, distance
from tests.launcher import run_ranks

GRIDS = ("2x1x1x1", "1x2x1x1", "1x1x2x1", "1x1x1x2")
LIGHTNING = ("lightning.pytorch", "torchmetrics")
TRANSFORMERS = ("transformers.trainer", "transformers.models.llama.modeling_llama")


# What the frameworks' public names of ranks say on a grid. Those of ACTIONS do something; the tests below try them.
_LIGHTNING = {"world_size": "ranks", "global_rank": "rank", "local_rank": "rank", "node_rank": "host"}
_FIRST = {"is_main_process": "first", "is_local_main_process": "first", "is_last_process": "last"}
NUMBERS = {
    "Fabric": _LIGHTNING,
    "Strategy": _LIGHTNING,
    "Trainer": _LIGHTNING | {"num_devices": "ranks", "num_nodes": "hosts"},
    "LightningModule": {"global_rank": "rank", "local_rank": "rank"},
    "Accelerator": _FIRST
    | {"num_processes": "data ranks", "process_index": "data rank", "local_process_index": "rank"},
    "PartialState": _FIRST,
    "TrainingArguments": {
        "world_size": "ranks",
        "process_index": "rank",
        "local_process_index": "rank",
        "local_rank": "rank" if version("transformers") < "5" else "unset",
    },
    "HFTrainer": {"get_tp_size": "peers", "is_local_process_zero": "first", "is_world_process_zero": "first"},
}
ACTIONS = {
    "rank_zero_first", "process_dataloader", "pad_across_processes", "split_between_processes", "main_process_first",
    "local_main_process_first", "on_process", "on_local_process", "on_main_process", "on_local_main_process",
    "on_last_process", "destroy_process_group", "get_process_log_level", "log_level_replica",
    "create_accelerator_and_postprocess", "dataloader_multiprocessing_context",
}  # fmt: skip
OTHERS_PARALLELISM = r"^(context|data|data_parallel|pipeline|tensor)_parallel_(shard_)?rank$"  # wants its plugin


def numbers_of(owner, kind):
    values = {name: getattr(owner, name) for name in NUMBERS[kind]}
    return {f"{kind}.{name}": value() if callable(value) else value for name, value in values.items()}


def check_numbers(numbers, rank, grid):
    parts, ranks = parts_of(grid), axo.Grid.parse(grid).world_size
    meaning = {
        "ranks": ranks, "rank": rank, "data ranks": parts, "data rank": rank // (ranks // parts),
        "peers": ranks // parts, "first": rank == 0, "last": rank == ranks - 1, "host": 0, "hosts": 1,
        "unset": -1,
    }  # fmt: skip
    for name, value in numbers.items():
        kind, _, name = name.partition(".")
        assert value == meaning[NUMBERS[kind][name]], (kind, name, value)


def test_every_public_name_of_ranks_has_a_meaning_on_a_grid():
    """What the frameworks that are installed offer, by its name, and no more: a new one wants a line in the table."""
    import accelerate
    import lightning as L
    import lightning.pytorch as pl
    import transformers
    from lightning.pytorch.strategies import ParallelStrategy

    owners = {
        "Fabric": L.Fabric, "Strategy": ParallelStrategy, "Trainer": pl.Trainer, "LightningModule": pl.LightningModule,
        "Accelerator": accelerate.Accelerator, "PartialState": accelerate.PartialState,
        "TrainingArguments": transformers.TrainingArguments, "HFTrainer": transformers.Trainer,
    }  # fmt: skip
    for kind, owner in owners.items():
        names = {
            name for name in dir(owner) if re.search(r"rank|world|replica|process|num_devices|num_nodes|tp_size", name)
        }
        names = {name for name in names if not name.startswith("_") and not re.match(OTHERS_PARALLELISM, name)}
        assert names - ACTIONS == set(NUMBERS[kind]), kind


def parts_of(grid):
    return 1 if grid is None else int(grid[4]) * int(grid[6])


def union(ranks, grid):
    """What all data ranks have, of one rank each, in order."""
    parts = [ranks[index] for index in range(len(ranks)) if index < parts_of(grid)] if grid[4:] != "1x1" else ranks[:1]
    return sorted(itertools.chain.from_iterable(parts))


def net():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))


def rows(count=8):
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(1))


def fit(grid, *, batch=8, check=9, predict=False, callbacks=(), steps=1, lr=0.1, **options):
    """A Trainer's numbers, metrics, gradients and weights; rows of validation that each rank has seen."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import BasePredictionWriter, ThroughputMonitor
    from lightning.pytorch.loggers.logger import DummyLogger
    from lightning.pytorch.utilities import grad_norm  # a program's own name for it, from before the strategy
    from lightning.pytorch.utilities.model_summary import ModelSummary
    from torchmetrics import CatMetric, SumMetric

    from axo.integrations.trainer import AxoStrategy

    seen, values = [], {}

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.total, self.all = net(), SumMetric(), CatMetric()

        def training_step(self, batch, index):
            out = self.all_gather(self.net(batch[0]), sync_grads=True)
            out = out.flatten(0, 1) if out.dim() == 3 else out
            self.total.update(batch[0].shape[0])
            self.all.update(batch[1])
            return (out @ out.T).square().mean()

        def on_before_optimizer_step(self, optimizer):
            values.setdefault("grad_norm", {name: float(norm) for name, norm in grad_norm(self, 2).items()})

        def on_train_epoch_end(self):
            values["sum"], values["cat"] = float(self.total.compute()), sorted(self.all.compute().tolist())

        def validation_step(self, batch, index):
            seen.extend(batch[1].tolist())
            self.log("val_loss", self.net(batch[0]).square().mean(), sync_dist=True)

        def predict_step(self, batch, index):
            return self.net(batch[0])[:, 0].tolist()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=lr)

    class Writer(BasePredictionWriter):
        def write_on_epoch_end(self, trainer, module, predictions, batch_indices):
            self.indices = list(itertools.chain.from_iterable(batch_indices))

    ranks, writer = parts_of(grid), Writer("epoch")
    monitor = ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]))
    trainer = pl.Trainer(
        strategy="auto" if grid is None else AxoStrategy(grid, like_one_device=True), accelerator="cpu",
        devices=1 if grid is None else "auto", max_steps=steps, logger=DummyLogger(), enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, log_every_n_steps=1,
        callbacks=[monitor, writer, *callbacks], **options,
    )  # fmt: skip
    module = Module()

    def loader(count, size):
        return DataLoader(TensorDataset(rows(count), torch.arange(count)), batch_size=max(size // ranks, 1))

    trainer.fit(module, loader(8, batch), loader(check, 4))
    for kind, owner in (("Trainer", trainer), ("Strategy", trainer.strategy), ("LightningModule", module)):
        values.setdefault("numbers", {}).update(numbers_of(owner, kind) if grid else {})
    values["val_loss"] = float(trainer.callback_metrics["val_loss"])
    values["parameters"] = ModelSummary(module).total_parameters
    values["devices"] = {each.world_size for each in monitor._throughputs.values()}
    state = module.state_dict() if grid is None else trainer.strategy.lightning_module_state_dict()
    values["weights"] = {name: value.clone() for name, value in state.items()}
    if predict:
        values["predictions"] = list(itertools.chain.from_iterable(trainer.predict(module, loader(check, 4))))
        values["indices"] = list(itertools.chain.from_iterable(writer.indices))
    return values, seen


def predict_too(grid):
    return fit(grid, predict=True)


@pytest.mark.parametrize(
    "grid", ["2x1x1x1", "1x1x2x1", *(pytest.param(g, marks=pytest.mark.soak) for g in GRIDS[1::2])]
)
def test_lightnings_metrics_gathers_and_counters_are_those_of_one_device(grid):
    expected, _ = fit(None, predict=True)
    ranks = run_ranks(predict_too, 2, grid, env=ELASTIC, preload=LIGHTNING)
    for rank, (values, _) in enumerate(ranks):
        check_numbers(values["numbers"], rank, grid)
        assert values["devices"] == {parts_of(grid)}
        assert values["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
        for name in ("sum", "cat", "val_loss", "parameters"):
            assert values[name] == pytest.approx(expected[name], rel=1e-5), name
    assert union([seen for _, seen in ranks], grid) == list(range(9))
    for name in ("predictions", "indices"):
        values_of_all = union([values[name] for values, _ in ranks], grid)
        assert values_of_all == pytest.approx(sorted(expected[name]), rel=1e-5), name
    assert distance(ranks[0][0]["weights"], expected["weights"]) < 1e-5


@pytest.mark.parametrize(("count", "batch", "drop"), [(9, 1, False), (9, 2, False), (9, 2, True), (8, 2, False)])
@pytest.mark.parametrize("stand_ins", [False, True])
def test_each_epoch_has_the_order_of_one_device(count, batch, drop, stand_ins):
    """Of a generator that the program gave, from which torch's sampler draws once more at its end."""
    from axo.integrations.fabric.loader import split_in_order

    def loader(size):
        order = torch.Generator().manual_seed(42)
        return DataLoader(torch.arange(count), size, shuffle=True, generator=order, drop_last=drop)

    alone, places = loader(2 * batch), [SimpleNamespace(row_parts=2, row_part=rank) for rank in range(2)]
    parts = [split_in_order(loader(batch), place, stand_ins=stand_ins) for place in places]
    for _ in range(3):
        whole, (one, other) = [each.tolist() for each in alone], [[each.tolist() for each in part] for part in parts]
        if stand_ins:
            lines = zip(one, other, whole, strict=True)
            for number, (a, b, expected) in enumerate(lines):
                b = [] if parts[1].batch_sampler.stands_in(number) else b
                assert sorted(a + b) == sorted(expected) and not parts[0].batch_sampler.stands_in(number)
        else:
            rows = [row for a, b in zip(one, other, strict=True) for row in itertools.zip_longest(a, b)]
            order = [x for row in rows for x in row if x is not None]
            assert order == list(itertools.chain.from_iterable(whole))


def test_a_sampler_that_is_cut_already_is_not_cut_again():
    from axo.integrations.fabric.loader import split_in_order

    place, data = SimpleNamespace(row_parts=2, row_part=1), torch.arange(16)
    sampler = DistributedSampler(data, 2, 1, shuffle=False)
    read = split_in_order(DataLoader(data, 1, sampler=sampler), place)
    assert [each.item() for each in read] == list(range(1, 16, 2))


def test_fewer_samples_than_a_batch_of_all_ranks_are_refused_where_the_rest_is_dropped():
    """Else a run would train nothing, and say that it is done."""
    from axo.integrations.fabric.loader import split_in_order

    place, loader = SimpleNamespace(row_parts=4, row_part=0), DataLoader(torch.arange(7), 2, drop_last=True)
    with pytest.raises(axo.Refused, match="7 samples are less than one batch of 2 on each of 4 data ranks"):
        split_in_order(loader, place)


def test_an_order_that_is_gone_on_with_is_that_of_its_epoch():
    """Oracle: a process that has read all epochs before."""
    from axo.integrations.fabric.loader import Position, split_in_order

    def loader():
        order = torch.Generator().manual_seed(7)
        place = SimpleNamespace(row_parts=2, row_part=0)
        return split_in_order(DataLoader(torch.arange(8), 1, shuffle=True, generator=order), place)

    def epoch(position, read):
        return [each.item() for each in position.batches(read, lambda: iter(read), 2)]

    position, read = Position(), loader()
    epochs = [epoch(position, read) for _ in range(3)]
    again, read = Position(), loader()
    again.load_state_dict({"epoch": 1, "samples": 4})
    assert epoch(again, read) == epochs[1][2:] != epochs[0][2:]
    assert epoch(again, read) == epochs[2]


def mean_of_unequal_tokens():
    """LitGPT's loss in pretraining, of data that leaves tokens out: the mean over data ranks against that of all."""
    import litgpt.pretrain
    from litgpt.utils import chunked_cross_entropy

    from axo.integrations.data_ranks import reduce
    from axo.integrations.litgpt.options import Options
    from axo.integrations.litgpt.patches import LitGPTRun

    comms = axo.connect("1x1x2x1")
    logits = torch.randn(2, 6, 10, generator=torch.Generator().manual_seed(0), requires_grad=True)
    targets = torch.arange(12).view(2, 6) % 10
    targets[1, 2:] = -100
    run = LitGPTRun(litgpt.pretrain, Options(grid=axo.Grid.parse("1x1x2x1")))
    run.strategy = SimpleNamespace(comms=comms, stands_in=False, streams=False)
    mine = slice(comms.data_rank, comms.data_rank + 1)
    loss = run.chunked_cross_entropy(chunked_cross_entropy, logits[mine], targets[mine])
    (grad,) = torch.autograd.grad(loss, logits)
    whole = chunked_cross_entropy(logits, targets)
    (expected,) = torch.autograd.grad(whole, logits)
    torch.testing.assert_close(reduce(loss.detach(), comms, "mean"), whole.detach())
    torch.testing.assert_close(reduce(grad, comms, "mean"), expected)
    run.strategy.stands_in = comms.data_rank == 1  # its row is another's
    loss = run.chunked_cross_entropy(chunked_cross_entropy, logits[mine], targets[mine])
    alone = chunked_cross_entropy(logits[:1], targets[:1])
    torch.testing.assert_close(reduce(loss.detach(), comms, "mean"), alone.detach())


def test_litgpts_means_are_over_all_tokens():
    run_ranks(mean_of_unequal_tokens, 2, preload=("litgpt.pretrain",))


class CutByRank(IterableDataset):
    """As a program cuts a stream that each process is to read its part of."""

    def __iter__(self):
        from torch.distributed import get_rank, get_world_size

        yield from range(int(get_rank()), 8, int(get_world_size()))


class CutByEnvironment(IterableDataset):
    def __iter__(self):
        yield from range(int(os.environ["RANK"]), 8, int(os.environ["WORLD_SIZE"]))


class Parts(torch.utils.data.Sampler):
    """Keeps the numbers that it was made with."""

    def __init__(self, rank, world_size):
        self.rank, self.world_size = rank, world_size

    def __iter__(self):
        return iter(range(self.rank, 8, self.world_size))

    def __len__(self):
        return 8 // self.world_size


class Pieces(torch.utils.data.Sampler):
    """The same under names that nobody knows."""

    def __init__(self, number, count):
        self.number, self.count = number, count

    def __iter__(self):
        return iter(range(self.number, 8, self.count))

    def __len__(self):
        return 8 // self.count


def read(grid):
    """Rows that this rank gets of loaders that a program has cut by rank, and what is refused."""
    import lightning as L
    from lightning.fabric.utilities.throughput import ThroughputMonitor
    from torchmetrics import SumMetric

    from axo.integrations.fabric.strategy import AxoStrategy

    fabric = L.Fabric(accelerator="cpu", strategy=AxoStrategy(grid))
    fabric.launch()
    data = TensorDataset(torch.arange(8))
    default = DistributedSampler(data, shuffle=False)
    fed = DistributedSampler(data, num_replicas=fabric.world_size, rank=fabric.global_rank, shuffle=True, seed=5)
    fed.set_epoch(3)
    loaders = [
        DataLoader(data, batch_size=2, sampler=default),
        DataLoader(data, batch_size=2, sampler=fed),
        DataLoader(CutByRank(), batch_size=2),
        DataLoader(CutByRank(), batch_size=2, num_workers=1),
        DataLoader(CutByEnvironment(), batch_size=2),
    ]
    rows = []
    for loader in loaders:
        batches = [batch[0] if isinstance(batch, list) else batch for batch in fabric.setup_dataloaders(loader)]
        rows.append(torch.cat(batches).tolist())
    refused = None
    for sampler in (Parts, Pieces):
        try:
            own = DataLoader(data, batch_size=2, sampler=sampler(fabric.global_rank, fabric.world_size))
            fabric.setup_dataloaders(own, use_distributed_sampler=False)
        except axo.Refused as error:
            refused = f"{refused or ''} {error}"
    metric = SumMetric(process_group=torch.distributed.new_group())  # of all ranks too
    metric.update(1)
    counted = {ThroughputMonitor(fabric).world_size, int(metric.compute())}
    return rows, refused, counted, numbers_of(fabric, "Fabric")


@pytest.mark.parametrize("grid", ["2x1x2x1", *(pytest.param(grid, marks=pytest.mark.soak) for grid in GRIDS)])
def test_data_that_a_program_has_cut_by_rank_is_cut_by_data_rank(grid):
    """Oracle: the data ranks read each row once."""
    count = 4 if grid == "2x1x2x1" else 2
    ranks = run_ranks(read, count, grid, env=ELASTIC, preload=("lightning.fabric",))
    peers = count // parts_of(grid)
    for index in range(5):
        parts = [rows[index] for rows, *_ in ranks]
        assert all(parts[rank] == parts[rank // peers * peers] for rank in range(count)) or grid == "1x1x1x2"
        assert sorted(itertools.chain.from_iterable(parts[::peers])) == list(range(8))
    for rank, (_, refused, counted, numbers) in enumerate(ranks):
        check_numbers(numbers, rank, grid)
        assert (peers == 1) == (refused is None) and counted == {parts_of(grid)}
        assert refused is None or ("Parts has part" in refused and f"Pieces has part {rank} of {count}" in refused)


class Stream(IterableDataset):
    """Rows of a language model, and nothing that says how many."""

    def __init__(self, count, seed=0):
        self.count, self.seed = count, seed

    def __iter__(self):
        from examples.nanogpt.model import rows

        for row in rows(self.count, seed=self.seed):
            yield {"input_ids": row, "labels": row}


def hugging_face(grid, out, check):
    """What Hugging Face's Trainer and accelerate's Accelerator say and compute; ``check`` rows of evaluation."""
    from accelerate import PartialState
    from accelerate.utils import gather, gather_object, reduce
    from transformers import Trainer, TrainingArguments

    from examples.hf.train import model_of

    ranks, values = parts_of(grid), {}
    arguments = TrainingArguments(
        output_dir=str(out), use_cpu=True, max_steps=3, per_device_train_batch_size=4 // ranks,
        per_device_eval_batch_size=4 // ranks, learning_rate=1e-3, logging_steps=1, save_strategy="no", report_to=[],
        disable_tqdm=True, seed=7, include_num_input_tokens_seen=True,
    )  # fmt: skip

    def trainer_of():
        data = {"train_dataset": Stream(16), "eval_dataset": Stream(check, seed=5)}
        trainer = Trainer(model=model_of(), args=arguments, **data)
        if grid is None:
            return trainer
        from axo.integrations.hugging_face import on_grid

        return on_grid(trainer, grid)

    values["eval_loss"] = trainer_of().evaluate()["eval_loss"]  # alone, without training before
    trainer = trainer_of()
    trainer.train()
    values["losses"] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    values["total_flos"] = trainer.state.total_flos
    values["tokens"] = float(trainer.state.num_input_tokens_seen)
    values["num_parameters"] = [trainer.model.num_parameters(exclude_embeddings=each) for each in (False, True)]
    accelerator = trainer.accelerator
    with accelerator.split_between_processes(list("abcdefgh")) as prompts:
        share = prompts
    one = torch.ones(2)
    values["reduce"] = [float(accelerator.reduce(one, how).sum()) for how in ("sum", "mean")]
    values["gather"] = sorted(accelerator.gather(torch.arange(8).chunk(ranks)[accelerator.process_index]).tolist())
    mine = accelerator.process_index
    with PartialState().split_between_processes(list("abcdefgh")) as prompts:
        values["a bare state's share"] = prompts == share
    values["functions"] = [gather(torch.tensor([mine])).tolist() if grid else [0], gather_object([mine])]
    values["functions"] += [accelerator.gather_for_metrics([str(mine)]), float(reduce(one, "sum").sum())]
    owners = {"Accelerator": accelerator, "PartialState": PartialState(), "TrainingArguments": arguments}
    for kind, owner in (owners | {"HFTrainer": trainer}).items():
        values.setdefault("numbers", {}).update(numbers_of(owner, kind) if grid else {})
    accelerator.wait_for_everyone()
    return values, share


@pytest.mark.parametrize(
    "grid", ["2x1x1x1", "1x1x2x1", *(pytest.param(g, marks=pytest.mark.soak) for g in GRIDS[1::2])]
)
def test_hugging_faces_numbers_are_those_of_one_device(grid, tmp_path):
    # The Trainer repeats a loss for each row of a full batch, so on two devices it is wrong of another last one.
    check = 6 if parts_of(grid) == 1 else 8
    expected, everything = hugging_face(None, tmp_path / "alone", check)
    ranks = run_ranks(hugging_face, 2, grid, tmp_path / "grid", check, preload=TRANSFORMERS, timeout=90)
    for rank, (values, _) in enumerate(ranks):
        for name in ("eval_loss", "losses", "tokens"):
            assert values[name] == pytest.approx(expected[name], abs=1.1e-4), name  # four digits are logged
        for name in ("total_flos", "num_parameters", "gather"):
            assert values[name] == expected[name], name
        assert values["reduce"] == [2 * parts_of(grid), 2]
        numbers = list(range(parts_of(grid)))
        assert values["functions"] == [numbers, numbers, [str(n) for n in numbers], 2 * parts_of(grid)]
        assert values["a bare state's share"]
        check_numbers(values["numbers"], rank, grid)
    assert union([share for _, share in ranks], grid) == everything


def read_with_accelerate(grid):
    """Rows of what a program has cut by rank, as CutByRank in the order of its rows, and what is refused."""
    from accelerate import Accelerator

    from axo.integrations.hugging_face import on_grid

    accelerator = on_grid(Accelerator(cpu=True), grid)
    rank, count = accelerator.state.process_index, accelerator.state.num_processes
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count)}
    data, rows = TensorDataset(torch.arange(8)), []
    loaders = [DataLoader(each, 2) for each in (CutByRank(), CutByEnvironment())]
    loaders.append(DataLoader(CutByRank(), 2, num_workers=1, multiprocessing_context="fork"))
    for loader in (*loaders, DataLoader(data, 2, sampler=DistributedSampler(data, count, rank, shuffle=False))):
        batches = [each[0] if isinstance(each, list) else each for each in accelerator.prepare(loader)]
        rows.append(torch.cat(batches).tolist())
    with pytest.raises(axo.Refused, match=f"Parts has part {rank} of {count}, but accelerate cuts what it prepares"):
        accelerator.prepare(DataLoader(data, 2, sampler=Parts(rank, count)))
    return rows


@pytest.mark.parametrize("grid", ["2x1x1x1", "1x1x2x1"])
def test_what_cuts_itself_is_not_cut_twice_by_accelerate(grid):
    one, other = run_ranks(read_with_accelerate, 2, grid, preload=("accelerate",))
    for rows, others in zip(one, other, strict=True):
        assert (rows == others) == (parts_of(grid) == 1)
        assert sorted(rows if parts_of(grid) == 1 else rows + others) == list(range(8))


def draw_under_own_seeds(grid):
    """Rows of accelerate's loaders, and of Fabric's in order, where each process has a seed of its own."""
    from accelerate import Accelerator

    from axo.integrations.fabric.loader import split_in_order
    from axo.integrations.hugging_face import on_grid

    accelerator, data = on_grid(Accelerator(cpu=True), grid), TensorDataset(torch.arange(16))
    comms = accelerator._axo_comms
    torch.manual_seed(accelerator.state.process_index)

    def weighted():
        return torch.utils.data.WeightedRandomSampler(torch.ones(16), 16, replacement=False)

    loaders = [
        ready(DataLoader(data, 2, **order))
        for ready in (accelerator.prepare, lambda loader: split_in_order(loader, comms))
        for order in ({"shuffle": True}, {"sampler": weighted()})
    ]
    return [torch.cat([batch for (batch,) in loader]).tolist() for loader in loaders]


@pytest.mark.parametrize("grid", ["2x1x1x1", "1x1x2x1"])
def test_peers_with_seeds_of_their_own_draw_the_same_order(grid):
    one, other = run_ranks(draw_under_own_seeds, 2, grid, preload=("accelerate", "lightning.fabric"))
    for rows, others in zip(one, other, strict=True):
        whole = rows if parts_of(grid) == 1 else rows + others
        assert sorted(whole) == list(range(16)) and (rows == others) == (parts_of(grid) == 1)


def mask(rows):
    """A collator that draws."""
    ids = torch.stack([row["input_ids"] for row in rows])
    return {"input_ids": torch.where(torch.rand(ids.shape) < 0.3, 1, ids), "labels": ids}


def draw_in_workers(grid, out):
    from transformers import Trainer, TrainingArguments

    from axo.integrations.hugging_face import on_grid
    from examples.hf.train import model_of

    arguments = TrainingArguments(
        str(out), use_cpu=True, per_device_train_batch_size=2, dataloader_num_workers=1, seed=7, report_to=[]
    )
    trainer = on_grid(Trainer(model_of(), arguments, mask, train_dataset=list(Stream(8))), grid)
    return next(iter(trainer.get_train_dataloader()))["input_ids"]


def test_workers_of_peers_draw_the_same_numbers(tmp_path):
    one, other = run_ranks(draw_in_workers, 2, "2x1x1x1", tmp_path, preload=TRANSFORMERS)
    assert torch.equal(one, other) and (one == 1).any()


def without_logits(out):
    from accelerate import Accelerator
    from transformers import Trainer, TrainingArguments

    from axo.integrations.hugging_face import on_grid
    from examples.hf.train import model_of

    arguments = TrainingArguments(str(out), use_cpu=True, label_smoothing_factor=0.1, report_to=[])
    with pytest.raises(axo.Refused, match="chunked_loss=True with a label_smoother, which takes logits; leave one"):
        on_grid(Trainer(model_of(), arguments), "2x1x1x1", chunked_loss=True)
    serial, ids = model_of().train(), torch.arange(8)[None]
    expected = serial(input_ids=ids, labels=ids).loss
    model = on_grid(Accelerator(cpu=True), "2x1x1x1", chunked_loss=True).prepare(serial)
    output = model(input_ids=ids, labels=ids)
    assert output.logits is None and abs(float(output.loss - expected)) < 1e-5


def test_a_loss_without_logits_is_accelerates_too(tmp_path):
    run_ranks(without_logits, 2, tmp_path, preload=TRANSFORMERS)


def counted_in_a_context() -> None:
    comms = axo.connect("1x1x4x1", context=2)
    mine = torch.tensor([comms.rank, 1], dtype=torch.float64, requires_grad=True)
    parts = data_ranks.gather(mine, comms)
    assert parts.tolist() == [[0, 1], [2, 1]]  # of the first rank of each context
    parts.sum().backward()
    assert mine.grad is not None
    assert mine.grad.tolist() == ([2, 2] if comms.context.rank == 0 else [0, 0])
    results = [data_ranks.reduce(mine, comms, op).tolist() for op in ("sum", "mean", "max")]
    assert results == [[3, 2], [1.5, 1], [3, 1]]
    assert data_ranks.reduce(torch.tensor(5), comms).item() == 10


def test_ranks_that_share_sequences_count_once() -> None:
    run_ranks(counted_in_a_context, 4)
