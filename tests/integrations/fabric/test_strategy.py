"""AxoStrategy in Lightning Fabric, against the same program on one rank with Fabric's own strategy."""

import functools
import os
import subprocess
import sys

import lightning as L
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.integrations.support import ELASTIC, LLAMA, distance, mean, tokens
from tests.launcher import rank_outcomes, run_ranks


def train(
    strategy,
    steps=4,
    *,
    rows=4,
    lr=3e-3,
    layers=2,
    parts=1,
    save_to=None,
    resume_from=None,
    meta=True,
    joint=False,
    **fabric_options,
):
    """A plain Fabric program. Returns its losses, the batches' checksums, and rank 0's whole state."""
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.utils import chunked_cross_entropy, reset_parameters

    fabric = L.Fabric(accelerator="cpu", strategy=strategy, **fabric_options)
    fabric.launch()
    fabric.seed_everything(7, verbose=False)
    with fabric.init_module(empty_init=meta):
        model = GPT(Config(**{**LLAMA, "n_layer": layers}))
    if meta:
        reset_parameters(model)
    if joint:
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1))
    else:
        model = fabric.setup(model)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1))
    replicas = (getattr(fabric.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1})["num_replicas"]
    data = DataLoader(TensorDataset(tokens(64)), batch_size=rows // replicas)
    data = fabric.setup_dataloaders(data)
    loss_of = getattr(fabric.strategy, "cross_entropy", chunked_cross_entropy)
    losses, sums = [], []
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if resume_from:
        fabric.load(resume_from, state)
    for index, (batch,) in enumerate(data):
        if index < state["step"]:
            continue
        if index == steps:
            break
        loss = 0.0
        for number, part in enumerate(batch.tensor_split(parts)):
            with fabric.no_backward_sync(model, enabled=number < parts - 1):
                each = loss_of(model(part[:, :-1]), part[:, 1:])
                fabric.backward(each / parts)
            loss += each.detach() / parts
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        sums.append(int(batch.sum()))
    state["step"] = steps
    if save_to:
        fabric.save(save_to, state)
    weights = fabric.strategy.get_module_state_dict(getattr(model, "_forward_module", model))
    return losses, sums, {name: value.clone() for name, value in weights.items()}, fabric.world_size


@functools.cache
def serially(**options):
    """The oracle: the program on Fabric's single device."""
    return train("auto", devices=1, **options)


def train_on_grid(grid, options):
    from axo.integrations.fabric.strategy import AxoStrategy

    strategy = AxoStrategy(grid, **(options := dict(options)).pop("strategy", {}))
    return train(strategy, **options)


@pytest.mark.parametrize(
    ("grid", "options"),
    [
        ("2x1x1x1", {}),
        ("1x2x1x1", {"meta": False, "joint": True}),
        ("1x1x2x1", {}),
        ("2x1x1x2", {"strategy": {"vocab_loss": True, "zero": 2}}),
        ("2x2x1x1", {"strategy": {"vocab_loss": True, "counts": "data"}}),
        ("2x2x1x1", {"strategy": {"vocab_loss": True, "counts": "data", "algorithm": "tesseract"}}),
    ],
    ids=str,
)
def test_training_equals_one_rank(grid, options):
    """Oracle: the program on Fabric's single device. fp32, 4 steps: losses to 1e-5, the model to 1e-5."""
    results = run_ranks(train_on_grid, eval(grid.replace("x", "*")), grid, options, env=ELASTIC, timeout=90)
    serial_options = {key: value for key, value in options.items() if key != "strategy"}
    losses, sums, weights, _ = serially(**serial_options)
    x, y, z, data = map(int, grid.split("x"))
    own = x if options.get("strategy", {}).get("algorithm") == "tesseract" else 1  # x has rows of its own there
    lines = [results[x * y * (line // own) + line % own] for line in range(own * z * data)]  # one rank of each
    for rank, result in enumerate(results):
        line = lines[rank // (x * y) * own + rank % own]
        assert result[0] == pytest.approx(line[0], rel=1e-6), "peers disagree"
        assert result[1] == line[1], "peers read different batches"
        assert result[3] == (len(lines) if options.get("strategy", {}).get("counts") == "data" else len(results))
    assert mean(line[0] for line in lines) == pytest.approx(losses, abs=1e-5)
    assert [sum(column) for column in zip(*(line[1] for line in lines), strict=True)] == sums
    assert distance(results[0][2], weights) < 1e-5 and losses[-1] < losses[0]
    assert all(not result[2] for result in results[1:])


def test_a_checkpoint_of_fabric_goes_on_elsewhere(tmp_path):
    """Two steps on 2x1x1x2 with ZeRO, two more on 1x2x1x1 and on Fabric's single device, against four: 1e-5."""
    whole = serially()
    options = {"steps": 2, "save_to": tmp_path / "half.ckpt", "strategy": {"zero": 1}}
    run_ranks(train_on_grid, 4, "2x1x1x2", options, env=ELASTIC)
    options = {"resume_from": tmp_path / "half.ckpt"}
    on_grid = run_ranks(train_on_grid, 2, "1x2x1x1", options, env=ELASTIC)[0]
    alone = train("auto", devices=1, **options)
    for resumed in (on_grid, alone):
        assert resumed[0] == pytest.approx(whole[0][2:], abs=1e-5) and resumed[1] == whole[1][2:]
        assert distance(resumed[2], whole[2]) < 1e-5


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-mixed"])
def test_precisions(precision):
    """Oracle: one device in fp32, within 1%. 16-mixed scales losses, and all ranks skip the same steps."""
    results = run_ranks(train_in, 4, "2x1x2x1", precision, env=ELASTIC)
    losses = serially()[0]
    assert mean([results[0][0], results[2][0]]) == pytest.approx(losses, rel=0.01)
    assert all(result[1] == results[0][1] for result in results)
    assert results[0][1] == ({2.0**15} if precision == "16-mixed" else {None})


def train_in(grid, precision):
    """Losses, and the scales that the loss was given."""
    from lightning.fabric.plugins import MixedPrecision

    import axo
    from axo.integrations.fabric.strategy import AxoStrategy

    options = {"precision": precision}
    if precision == "16-mixed":  # Fabric makes bf16-mixed of it on a CPU, unless it is given as a plugin
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15)
        options = {"plugins": MixedPrecision("16-mixed", "cpu", scaler)}
    strategy = AxoStrategy(grid)
    losses = train(strategy, **options)[0]
    scaler = getattr(strategy.precision, "scaler", None)
    assert scaler is None or isinstance(scaler, axo.GradScaler)
    return losses, {scaler and scaler.get_scale()}


def overflow_on_one_rank(grid):
    """Whether a step was taken, and the scale after it, when one rank's shard alone holds an infinite gradient."""
    import axo
    from axo.integrations.fabric.replacements import agreeing

    comms = axo.connect(grid)
    scaler = agreeing(torch.amp.GradScaler("cpu", init_scale=8.0), comms)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale(weight.sum()).backward()
    if comms.rank == 1:
        weight.grad[0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    return weight.tolist(), scaler.get_scale()


def test_an_overflow_on_one_rank_skips_the_step_on_all():
    assert run_ranks(overflow_on_one_rank, 2, "2x1x1x1") == [([1.0, 1.0], 4.0)] * 2


def read_shuffled(grid):
    """Batches of a loader that shuffles by a generator, and a number drawn before and after reading."""
    import lightning as L

    from axo.integrations.fabric.strategy import AxoStrategy

    fabric = L.Fabric(accelerator="cpu", strategy=AxoStrategy(grid))
    fabric.launch()
    torch.manual_seed(fabric.global_rank)  # peers must not need equal seeds
    data = fabric.setup_dataloaders(
        DataLoader(TensorDataset(torch.arange(12)), batch_size=2, shuffle=True), use_distributed_sampler=False
    )
    state = torch.get_rng_state()
    batches = [batch.tolist() for (batch,) in data]
    return batches, bool(torch.equal(state, torch.get_rng_state())), len(data)


def test_peers_read_the_same_batches_from_any_loader():
    results = run_ranks(read_shuffled, 8, "2x2x2x1", env=ELASTIC)
    for rank, (batches, untouched, length) in enumerate(results):
        assert batches == results[rank // 4 * 4][0] and untouched and length == 6
        assert sorted(index for batch in batches for index in batch) == list(range(12))
    assert results[0][0] != results[4][0]


def fail_to_read(grid):
    import axo
    from axo.integrations.fabric.loader import SharedLoader

    class Bad(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            if index == 2:
                raise OSError("disk on fire")
            return index

    comms = axo.connect(grid)
    read = []
    try:
        for batch in SharedLoader(DataLoader(Bad(), batch_size=1), comms):
            read.append(batch.item())
    except OSError as error:
        return read, str(error)


def test_an_error_of_the_reader_is_every_peers():
    assert run_ranks(fail_to_read, 4, "2x2x1x1") == [([0, 1], "disk on fire")] * 4


def make_fabric(grid, options):
    import lightning as L

    from axo.integrations.fabric.strategy import AxoStrategy

    fabric = L.Fabric(accelerator="cpu", strategy=AxoStrategy(grid), **options)
    fabric.launch()


@pytest.mark.parametrize(
    ("grid", "options", "message"),
    [
        ("2x2x1x1", {}, "grid 2x2x1x1 has 4 ranks, but 2 were started; start 4, or use a grid such as 2x1x1x1"),
        ("2x1x1x1", {"devices": 3}, "devices=3 does not fit grid 2x1x1x1; leave devices out"),
        ("2x1x1x1", {"num_nodes": 4}, "2 ranks, which do not divide over num_nodes=4"),
        (None, {}, "no grid; pass grid='2x2x2x1', or for strategy='axo' first call"),
    ],
    ids=str,
)
def test_wrong_set_ups_are_named_on_every_rank(grid, options, message):
    for outcome in rank_outcomes(make_fabric, 2, grid, options, env=ELASTIC):
        assert outcome.error == "ValueError" and message in outcome.message


def optimizers_set_up(grid):
    """What is said when each optimizer is set up, on split parameters or whole ones."""
    from litgpt.config import Config
    from litgpt.model import GPT

    from axo.integrations.fabric.strategy import AxoStrategy

    fabric = L.Fabric(accelerator="cpu", strategy=AxoStrategy(grid))
    fabric.launch()
    model, said = fabric.setup(GPT(Config(**LLAMA))), []
    for kind in (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.AdamW):
        try:
            fabric.setup_optimizers(kind(model.parameters()))
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("grid", ["1x1x2x1", "1x1x1x2"])
def test_optimizers_of_whole_tensors_are_refused_on_split_ones(grid):
    for adafactor, lbfgs, adamw in run_ranks(optimizers_set_up, 2, grid, env=ELASTIC):
        for name, said in (("Adafactor", adafactor), ("LBFGS", lbfgs)):
            assert (f"AxoStrategy: {name} does not update element by element" in said) == (grid == "1x1x2x1")
        assert adamw == ""


SCRIPT = """
import lightning as L, torch
from axo.integrations.lightning import AxoStrategy, register
register(lambda: AxoStrategy(grid="2x1x2x1"))
fabric = L.Fabric(accelerator="cpu", strategy="axo")
fabric.launch()
total = fabric.all_reduce(torch.tensor(float(fabric.global_rank)), reduce_op="sum")
assert (fabric.world_size, total.item()) == (4, 6.0)
open(f"rank{fabric.global_rank}", "w").write(str(fabric.strategy.distributed_sampler_kwargs["rank"]))
"""


@pytest.mark.soak
def test_fabric_launches_the_ranks_of_the_grid(tmp_path):
    """A script without torchrun: ``strategy="axo"``, registered with a grid, says how many processes Fabric starts."""
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(4)] == ["0", "0", "1", "1"]


@pytest.mark.parametrize("kept", [0, 300], ids=["empty", "cut"])
def test_a_checkpoint_that_cannot_be_read_is_named(tmp_path, kept):
    """torch says that its archive reader failed; not of which file."""
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

    from axo.integrations.fabric import whole_checkpoint

    path = tmp_path / "lit_model.pth"
    torch.save({"a": torch.zeros(100)}, path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"lit_model\.pth cannot be read \(.*\): it is damaged, or no checkpoint"):
        whole_checkpoint.load(path, TorchCheckpointIO(), True)


def test_a_checkpoint_of_other_classes_is_not_called_damaged(tmp_path):
    """Oracle: torch reads it with weights_only=False. Text is no checkpoint, whatever torch's reader trips over."""
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

    from axo.integrations.fabric import whole_checkpoint

    path, io = tmp_path / "lit_model.pth", TorchCheckpointIO()
    torch.save({"rate": np.float64(0.5)}, path)
    with pytest.raises(ValueError, match=r"\(it holds a numpy.*scalar\): weights_only=False reads it"):
        whole_checkpoint.load(path, io, None)
    assert whole_checkpoint.load(path, io, False) == {"rate": 0.5}
    path.write_text("hello world, this is text\n")
    with pytest.raises(ValueError, match=r"\(torch\.save did not write it\): it is damaged, or no checkpoint"):
        whole_checkpoint.load(path, io, True)
