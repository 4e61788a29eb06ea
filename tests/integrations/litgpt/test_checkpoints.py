"""Checkpoints of ``axo litgpt``: read by stock LitGPT and by other grids, resumed, and generated from."""

import pytest
import torch

from axo.integrations.fabric.sharded_checkpoint import consolidate
from axo.integrations.litgpt.command import run as run_command
from tests.integrations.support import distance, tell
from tests.integrations.trainer import chat, generate, ranks_of, run
from tests.launcher import Command, run_ranks

FIVE = "step-00000005/lit_model.pth"


@pytest.fixture(scope="session")
def ten(folder):
    """An uninterrupted run of 10 steps on 2x1x2x1, which left a checkpoint after 5."""
    return run(folder, "ten", "2x1x2x1", save_interval=5)


@pytest.fixture(scope="session")
def sharded(folder, ten):
    """The five steps after those five on 1x2x1x2, with sharded checkpoints after 8 and 10."""
    del ten
    return run(folder, "sharded", "1x2x1x2", resume=folder / "ten" / FIVE, save_interval=2, sharded=True)


@pytest.mark.parametrize("grid", ["2x1x2x1", pytest.param("1x2x1x2", marks=pytest.mark.soak), None], ids=str)
def test_five_and_five_steps_are_ten(folder, ten, grid):
    """Oracle: the uninterrupted run. On the same grid bit by bit; on others, and in stock LitGPT (grid None): 1e-6."""
    losses, sums, state = run(folder, f"resumed-{grid}", grid, resume=folder / "ten" / FIVE)
    apart = distance(state["model"], ten[2]["model"])
    losses_apart = relative(losses, ten[0][5:])
    tell("litgpt, 5 + 5 steps", grid="2x1x2x1", then=grid or "serial", losses_apart=losses_apart, weights_apart=apart)
    assert sums == ten[1][5:]
    if grid == "2x1x2x1":
        assert (losses, apart) == (ten[0][5:], 0)
        return
    assert losses_apart < 1e-6
    assert apart < 1e-6
    for moment in ("exp_avg", "exp_avg_sq"):
        assert distance(_moments(state, moment), _moments(ten[2], moment)) < 1e-4


@pytest.mark.parametrize(
    ("grid", "accumulate", "sharded"), [("2x1x1x1", 2, False), pytest.param("1x1x2x1", 2, True, marks=pytest.mark.soak)]
)
def test_a_run_goes_on_with_other_iterations(folder, ten, grid, accumulate, sharded):
    """Saved after 5 iterations of 8 samples, it goes on in iterations of fewer: the same 5 steps on the same samples.

    Losses are close to the other run's only, as LitGPT sets the learning rate by iteration.
    """
    out = f"iterations-{grid}"
    losses, sums, state = run(
        folder, out, grid, resume=folder / "ten" / FIVE, accumulate=accumulate, save_interval=5, sharded=sharded
    )
    assert len(losses) == 5 * accumulate
    steps = [sum(sums[first : first + accumulate]) for first in range(0, len(losses), accumulate)]
    assert steps == ten[1][5:10]  # LitGPT reads one batch more, at which it ends
    if not sharded:
        assert (state["iter_num"], state["step_count"]) == (10 * accumulate, 10)
    means = [sum(losses[first : first + accumulate]) / accumulate for first in range(0, len(losses), accumulate)]
    assert means == pytest.approx(ten[0][5:], rel=0.02)


def count(strategy, then, state, folder):
    state = dict(state)
    return strategy._iterations(folder, state, then)


def test_iterations_that_cannot_be_counted_are_refused(tmp_path):
    """What stock LitGPT says of its run is read; what is not whole, or not said, is an error that says what to do."""
    from litgpt.args import TrainArgs

    from axo.integrations.litgpt.strategy import LitGPTStrategy, _samples_of_stock

    strategy = LitGPTStrategy("1x1x2x1")
    strategy.train = TrainArgs(global_batch_size=24, micro_batch_size=3)  # 6 samples an iteration, 4 iterations a step
    (tmp_path / "hyperparameters.yaml").write_text("devices: 2\nnum_nodes: 1\ntrain:\n  micro_batch_size: 2\n")
    assert _samples_of_stock(tmp_path) == 4
    assert count(strategy, 4, {"iter_num": 12, "step_count": 2}, tmp_path) == 8
    with pytest.raises(ValueError, match="after 20 samples, which are no whole number of iterations of 6 samples"):
        count(strategy, 4, {"iter_num": 5, "step_count": 2}, tmp_path)
    (tmp_path / "hyperparameters.yaml").write_text("devices: auto\ntrain:\n  micro_batch_size: 2\n")
    assert _samples_of_stock(tmp_path) is None
    assert count(strategy, None, {"iter_num": 8, "step_count": 2}, tmp_path) == 8
    with pytest.raises(ValueError, match="does not say how many samples an iteration was"):
        count(strategy, None, {"iter_num": 6, "step_count": 2}, tmp_path)


def test_a_sharded_run_equals_a_whole_one(folder, ten, sharded):
    """Oracle: the uninterrupted run on another grid, which saved whole checkpoints: 1e-6."""
    losses, sums, state = sharded
    assert relative(losses, ten[0][5:]) < 1e-6 and sums == ten[1][5:]
    assert state is None and (folder / "sharded" / "final" / "lit_model.pth").is_dir()
    consolidate(folder / "sharded" / "final", folder / "sharded-whole", optimizer=True)
    state = torch.load(folder / "sharded-whole" / "lit_model.pth", weights_only=True)
    assert state.keys() == ten[2].keys()
    assert (state["iter_num"], state["train_dataloader"]) == (ten[2]["iter_num"], ten[2]["train_dataloader"])
    assert distance(state["model"], ten[2]["model"]) < 1e-6
    for moment in ("exp_avg", "exp_avg_sq"):
        assert distance(_moments(state, moment), _moments(ten[2], moment)) < 1e-4


def test_a_sharded_checkpoint_goes_on_on_another_grid(folder, ten, sharded):
    """And made whole, in stock LitGPT. Oracle: the uninterrupted run."""
    del sharded
    step = folder / "sharded" / "step-00000008"
    command = Command("axo.cli", "consolidate", str(step), str(folder / "eight"), "--optimizer")
    output = command.communicate()
    assert command.returncode == 0, output
    assert {path.name for path in step.iterdir()} == {path.name for path in (folder / "eight").iterdir()}
    for grid, source in (("2x1x2x1", step), (None, folder / "eight")):
        losses, sums, state = run(folder, f"from-sharded-{grid}", grid, resume=source / "lit_model.pth")
        assert relative(losses, ten[0][8:]) < 1e-6 and sums == ten[1][8:]
        assert distance(state["model"], ten[2]["model"]) < 1e-6


def relative(losses, others):
    """The largest relative difference. Other grids add up otherwise: the last bits of a loss near 5 are 5e-7 each."""
    return max(abs(loss / other - 1) for loss, other in zip(losses, others, strict=True))


def _moments(state, name):
    return {index: values[name] for index, values in state["optimizer"]["state"].items()}


@pytest.mark.soak
def test_a_stock_checkpoint_goes_on_on_a_grid(folder, ten):
    """Oracle: the stock run itself."""
    whole = run(folder, "stock", None, save_interval=5)
    losses, sums, state = run(folder, "from-stock", "2x2x1x1", resume=folder / "stock" / FIVE)
    assert losses == pytest.approx(whole[0][5:], abs=1e-5) and sums == whole[1][5:]
    assert distance(state["model"], whole[2]["model"]) < 1e-6


def save_again(source, target, grid):
    """Load a checkpoint's model on a grid and save it at once."""
    import lightning as L
    from litgpt.config import Config
    from litgpt.model import GPT

    from axo.integrations.fabric.strategy import AxoStrategy

    fabric = L.Fabric(accelerator="cpu", strategy=AxoStrategy(grid))
    fabric.launch()
    with fabric.init_module(empty_init=True):
        model = GPT(Config.from_file(source.parent / "model_config.yaml"))
    model = fabric.setup(model)
    fabric.load(source, {"model": model}, strict=False)
    fabric.save(target, {"model": model})


def test_parallel_serial_parallel_is_bit_equal(folder, ten):
    """Whole weights -> shards of 2x2x2x1 -> whole weights."""
    source, target = folder / "ten" / "final" / "lit_model.pth", folder / "again.pth"
    ranks, environment = ranks_of("2x2x2x1")
    run_ranks(save_again, ranks, source, target, "2x2x2x1", env=environment)
    again = torch.load(target, weights_only=True)["model"]
    assert again.keys() == ten[2]["model"].keys()
    assert all(torch.equal(again[name], value) for name, value in ten[2]["model"].items())


def in_stages(checkpoint):
    return generate(checkpoint, "1x1x1x1", pipeline=2)


def test_generation_from_a_parallel_checkpoint(folder, ten, sharded):
    """Sixteen greedy tokens of stock ``litgpt generate``, and the same on a grid; sampling agrees on all ranks.

    Also of a sharded checkpoint, as it is and made whole; LoRA, which merges into it, refuses it in one line.
    """
    del sharded
    checkpoint = folder / "ten" / "final"
    stock = run_ranks(generate, 1, checkpoint)[0]
    assert len(stock) == 24
    ranks, environment = ranks_of("2x2x1x1")
    assert run_ranks(generate, ranks, checkpoint, "2x2x1x1", env=environment) == [stock] * ranks
    asked = run_ranks(chat, 1, checkpoint)[0]
    assert asked.count(">> Reply: ") == 2
    assert run_ranks(chat, 2, checkpoint, "2x1x1x1", env=ranks_of("2x1x1x1")[1])[0] == asked
    assert run_ranks(in_stages, 2, checkpoint, env=environment) == [stock] * 2
    sampled = run_ranks(generate, ranks, checkpoint, "2x2x1x1", None, 1.0, env=environment)
    consolidate(folder / "sharded" / "final", folder / "generated-from")
    assert (folder / "generated-from" / "tokenizer.json").is_file()
    assert run_ranks(generate, 1, folder / "generated-from")[0] == stock
    as_it_is = run_ranks(generate, 2, folder / "sharded" / "final", "2x1x1x1", env=ranks_of("2x1x1x1")[1])
    assert as_it_is == [stock] * 2
    with pytest.raises(ValueError, match="holds a sharded checkpoint; make it whole: axo consolidate"):
        run_command(["finetune_lora", str(folder / "sharded" / "final")])
    assert sampled == [sampled[0]] * ranks and sampled[0] != stock
