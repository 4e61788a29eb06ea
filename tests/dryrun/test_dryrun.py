"""The dry run: what a rank would send and hold, without peers.

Oracles: eight real CPU ranks that run the same step of ``axo.train`` (calls, bytes and order must be equal on every
rank; bytes of weights, moments and gradients too); a mistake planted in one rank, which must be named.
"""

import gc
import json
import os
import re
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

import axo
from axo import dryrun
from axo.cli import main as cli
from axo.cli.dryrun import _of_litgpt
from axo.comm import recording as recorded
from axo.comm.counting import observers as watch
from axo.comm.recording import recording
from axo.dryrun.step import routed_evenly
from axo.grid import Grid
from axo.launch import RankFailed
from axo.sharding import cut_sequence
from axo.train.config import TrainConfig
from tests.launcher import run_ranks

SIZES = {"n_layer": 2, "n_embd": 64, "intermediate_size": 96, "padded_vocab_size": 250, "n_query_groups": 8}
LATENT = SIZES | {
    "head_size": 16, "rope_interleave": True,
    "latent_attention": {
        "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 4,
    },
}  # fmt: skip
MIXTURE = SIZES | {"mlp_class_name": "LLaMAMoE", "n_expert": 8, "n_expert_per_token": 2, "moe_intermediate_size": 32}


def config(grid: str, **changes: Any) -> TrainConfig:
    base: dict[str, Any] = {"model_overrides": SIZES, "batch_size": 8, "seq_len": 16}
    return TrainConfig(grid=Grid.parse(grid), **base | changes)


CASES = [
    config("2x2x2x1"),
    config("2x2x2x1", recompute=True, gather_cache="none", precision="32-true"),
    config("2x1x2x2", recompute=True, accumulate=2),
    config("1x2x2x2", zero=2, overlap="oar"),
    config("2x1x2x2", zero=2, optimizer="muon", recompute=True),
    config("2x2x2x1", algorithm="tesseract"),
    config("2x1x2x1", pipeline=2, microbatches=4),
    config("2x1x4x1", context=4, recompute=True, precision="32-true"),
    config("1x1x4x2", context=2, context_kind="heads", chunked_loss=True, offload="activations", seq_len=1024),
    config("1x2x2x1", pipeline=2, microbatches=2, context=2, context_kind="gather"),
    config("2x2x2x1", model_overrides=LATENT),
    config("2x1x4x1", context=4, recompute=True, recompute_keeps="products", model_overrides=LATENT),
    config("1x2x4x1", experts=4, recompute=True, model_overrides=MIXTURE),
    config("1x1x4x2", experts=8, recompute=True, recompute_keeps="products", model_overrides=MIXTURE),
    config("2x1x2x2", precision="32-true", model_overrides=MIXTURE),
]
Issues = list[tuple[str, str, int]]  # operation, axis, bytes


def real(cases: list[TrainConfig], ranks: tuple[int, ...]) -> list[tuple[Issues, dict[str, int], Any]]:
    """On every rank: what the second step issues in order, and the bytes that are held; on ``ranks`` then what
    ``measure`` finds, while the others run two steps without it."""
    from torch.distributed import P2POp

    from axo.train import loop
    from axo.train.data import rank_rows

    torch.distributed.init_process_group("axo")
    messages: list[tuple[float, tuple[str, str, int]]] = []
    plain = P2POp.__init__

    def noted(self: P2POp, op: Any, tensor: torch.Tensor, *args: Any, **options: Any) -> None:
        plain(self, op, tensor, *args, **options)
        messages.append((time.perf_counter(), (op.__name__.removeprefix("i"), "pipeline", tensor.nbytes)))

    P2POp.__init__ = noted

    def steps(case: TrainConfig, comms: Any) -> tuple[Any, int, list[Any]]:
        trainer = loop.Trainer(case, comms, None)  # type: ignore[arg-type]
        rows = rank_rows(case.batch_size, case.grid, comms.coords, comms.arrangement, case.context)
        ids = cut_sequence(torch.zeros(len(rows), case.seq_len, dtype=torch.long), comms)
        for _ in range(2):
            messages.clear()
            watch.open()
            with routed_evenly(alone=False):
                trainer.accumulate(ids, ids)
            grads = sum(parameter.grad.nbytes for parameter in trainer.model.parameters())
            trainer.update()
            issued, _ = watch.close()
        return trainer, grads, issued

    found = []
    for case in cases:
        comms = axo.connect(case.grid, pipeline=case.pipeline, context=case.context, experts=case.experts)
        trainer, grads, issued = steps(case, comms)
        both = [(one.start, (one.op, one.axis, one.bytes)) for one in issued if one.axis != "pipeline"]
        issues = [one for _, one in sorted(both + messages)]
        states = [each for state in trainer.optimizer.state.values() for each in state.values()]
        moments = [each.nbytes for each in states if isinstance(each, torch.Tensor) and each.dim()]
        held = {"weights": sum(p.nbytes for p in trainer.model.parameters()), "optimizer": sum(moments)}
        comms.close()
        comms = axo.connect(case.grid, pipeline=case.pipeline, context=case.context, experts=case.experts)
        record = dryrun.measure(case, comms) if torch.distributed.get_rank() in ranks else None
        if record is None:
            steps(case, comms)
        found.append((issues, held | {"gradients": grads}, record))
        comms.close()
    return found


def is_what_ranks_do(cases: list[TrainConfig], ranks: tuple[int, ...], per_rank: list[Any]) -> None:
    for number, case in enumerate(cases):
        for rank in ranks:
            record = dryrun.run(case, rank)
            issued, held, measured = per_rank[rank][number]
            dry = [
                (one.op, one.axis.replace("everyone", "world"), one.elements * getattr(torch, one.dtype).itemsize)
                for one in record.issued
            ]
            assert dry == issued, f"rank {rank} of {case}"
            tables = record.held["weights"] - held["weights"]  # those of the rotary embedding
            assert 0 <= tables <= 2 * 4 * case.seq_len * 64, case
            assert record.held["optimizer"] == held["optimizer"], case
            grads = record.peaks["optimizer"].by_kind["gradients"]  # those in fp32 lie in their padded buckets
            assert held["gradients"] <= grads <= 1.1 * held["gradients"], case
            tokens = case.batch_size * case.seq_len // (case.grid.z * case.grid.data)
            statistics = 8 * tokens + 64  # of the loss: they have values, which a dry run does not count
            statistics += 2 * 8 * 8 if "n_expert" in case.model_overrides else 0  # rows of each expert, of two blocks
            assert abs(record.saved - measured.saved) <= max(statistics, 0.01 * measured.saved), case
            # With torch 2.15 a real stage holds messages that it has sent; a dry one lets go of them when awaited.
            sent = sum(size for op, axis, size in dry if (op, axis) == ("send", "pipeline"))
            missing = measured.peak.total - record.peak.total
            assert -0.015 * measured.peak.total <= missing <= 0.015 * measured.peak.total + sent, case


@pytest.mark.slow
def test_a_dry_run_is_what_eight_ranks_do() -> None:
    is_what_ranks_do(CASES, (1, 6), run_ranks(real, 8, CASES, (1, 6), timeout=300))  # each place, and stage


def test_where_links_are_slow_memory_does_not_fill_with_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    def under_way(layers: int) -> int:
        case = config("1x1x4x1", precision="32-true", model_overrides=SIZES | {"n_layer": layers})
        return dryrun.run(case, 1).most["gradients under way"]

    fast = [under_way(layers) for layers in (6, 12)]
    monkeypatch.setattr(recorded, "_AT_ONCE", 1_000_000)  # no collective is complete before somebody waits for it
    slow = [under_way(layers) for layers in (6, 12)]
    assert slow[1] - fast[1] == slow[0] - fast[0] > 0


@pytest.mark.soak
def test_a_dry_run_is_what_sixteen_ranks_do() -> None:
    cases = [config("2x2x2x2"), config("2x2x2x2", recompute=True, zero=2, accumulate=2, batch_size=16)]
    is_what_ranks_do(cases, tuple(range(16)), run_ranks(real, 16, cases, tuple(range(16))))


def test_a_mistake_of_one_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    case = config("2x2x1x1")
    assert dryrun.compare(case, dryrun.run_all(case, range(4), processes=1)) == []
    plain = axo.nn.RMSNorm.forward

    def mistaken(self: axo.nn.RMSNorm, input: torch.Tensor) -> torch.Tensor:
        if self.comms.rank == 1 and self.name is not None and "h.1.norm_2" in self.name:
            self.comms.y.all_reduce(torch.ones(3))
        return plain(self, input)

    monkeypatch.setattr(axo.nn.RMSNorm, "forward", mistaken)
    bad = dryrun.compare(case, dryrun.run_all(case, range(4), processes=1))
    assert {one.axis for one in bad} == {"y"} and {one.other for one in bad} | {one.first for one in bad} == {1, 3}
    assert "of 3 float32, sum (test_dryrun.py:" in str(bad[0]) and "rank 1 issues" in str(bad[0])


def test_what_a_step_has_used_is_free_before_the_next() -> None:
    """Without the garbage collector: nothing that carried gradients is left when the next forward pass begins, and the
    logits of one micro-batch are gone when the next makes its own."""
    gc.disable()
    try:
        first = dryrun.run(config("2x1x2x2"))
        several = dryrun.run(config("2x1x2x2", batch_size=32, accumulate=4))
    finally:
        gc.enable()
    assert first.peaks["forward"].by_kind["gradients under way"] == 0
    assert several.peak.by_kind["activations"] < 2.2 * first.peak.by_kind["activations"]


def test_roles_are_shapes_and_every_axis_has_peers() -> None:
    """250 columns over x=4 are 63, 63, 63, 61; over z=8 that is 8 rows each, but for the last: 7, or 5 where x=3."""
    case = config("4x2x8x4", batch_size=32)
    roles = dryrun.representatives(case)
    assert sum(roles.values()) == case.grid.world_size
    assert {0, 1, 4, 8, 56, 59, 64} <= set(roles) and roles[0] > roles[56] > roles[59] > 0 == roles[4]
    assert dryrun.representatives(config("2x2x2x1")).keys() == set(range(8))


def test_peers_hold_what_this_rank_holds() -> None:
    comms = recording("2x1x4x1", rank=5)
    part = torch.arange(4.0)
    assert comms.z.all_gather(part).tolist() == [0, 1, 2, 3] * 4
    assert comms.x.all_reduce(part.clone()).tolist() == [0, 2, 4, 6]
    work = comms.z.reduce_scatter(part.clone(), op="avg", async_op=True)
    assert not work.is_completed() and work.wait().tolist() == [2] and work.is_completed()
    assert [(one.op, one.axis, one.elements) for one in comms.issued] == [
        ("all_gather", "z", 4), ("all_reduce", "x", 4), ("reduce_scatter", "z", 4)]  # fmt: skip
    with pytest.raises(ValueError, match="rank 8 is not one of the 8 ranks of grid 2x1x4x1"):
        recording("2x1x4x1", rank=8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model tiny --grid 2x2", "grid '2x2' is not of the form"),
        ("--model tiny --grid 2x1x1x1 --seq-len 32 --ranks 0,2", "'2' is not a rank of 2x1x1x1"),
        ("--model Mixtral-8x7B-v0.1 --grid 2x1x1x1 --experts 2", "experts=2 ranks do not divide z=1"),
        ("--model tiny --grid 2x1x1x1 --seq-len 4096", "seq-len=4096 is not in [1, block_size=1024]"),
        ("--model tiny --grid 16x1x1x1 --seq-len 32", "does not divide over x=16"),
        ("--model tiny --grid 1x1x2x1 --batch-size 3 --seq-len 32", "do not divide over z*data=2"),
        ("--model tiny --grid 2x1x1x1 --precision 16-mixed --seq-len 32", "use bf16-mixed or 32-true"),
        ("--model tiny --grid 2x1x1x1 --overlap all --seq-len 32", "overlap all is not known"),
        ("--grid 2x1x1x1", "give the model by --model NAME, or by --litgpt CONFIG"),
        ("--grid 2x1x1x1 --litgpt nowhere.yaml", "nowhere.yaml is not a file"),
        ("--model tiny --grid 8x8x1x99999 --seq-len 32", "a dry run knows grids of up to 1,048,576"),
        ("--model tiny --grid 2x1x1x1 --seq-len 32 --precision fp8", "precision='fp8' is not one of bf16-mixed"),
        ("--model tiny --grid 2x1x1x1 --seq-len 32 --batch-size 3 --accumulate 2", "accumulate=2 does not divide"),
        ("--model tiny --grid 1x1x4x1 --context 4 --seq-len 36", "does not divide into 2 x context=4 pieces"),
        ("--model tiny --grid 1x1x4x1 --context 3 --seq-len 36", "context=3 does not divide z=4"),
        ("--model tiny --grid 2x1x1x1 --seq-len 32 --offload optimizer", "beyond activations; leave the rest out"),
        ("--model tiny --grid 2x1x1x1 --seq-len 32 --cuts 2", "cuts=2 are of stages, and there is one"),
        ("--model tiny --grid 2x1x1x1 --seq-len 32 --microbatches 2", "microbatches=2 fill stages, and there is one"),
        ("--model tiny --grid 2x1x1x1 --seq-len 32 --microbatches -1", "microbatches=-1 is out of range; it must be"),
        ("--model tiny --grid 2x1x1x1 --seq-len 32 --model-override n_heads=2", "has no field 'n_heads'"),
    ],
)
def test_mistakes_end_in_one_line(arguments: str, message: str) -> None:
    found = CliRunner().invoke(cli.app, ["dryrun", *arguments.split()])
    assert found.exit_code == 2 and message in found.stderr and found.stderr.count("\n") == 1, found.stderr


def test_the_commands_options_are_those_of_a_run() -> None:
    case = TrainConfig(grid=Grid(2, 1, 1, 1), batch_size=1, seq_len=32, sequence_parallel=True)
    options = "--model tiny --grid 2x1x1x1 --seq-len 32 --sequence-parallel --microbatches 1 --ranks 1 --json -"
    found = CliRunner().invoke(cli.app, ["dryrun", *options.split()])
    (record,), expected = json.loads(found.stdout)["records"], dryrun.run(case, 1)
    assert record["issued"] == json.loads(json.dumps([one._asdict() for one in expected.issued]))
    assert record["peak_bytes"] == expected.peak.by_kind | {"total": expected.peak.total}
    assert ("reduce_scatter", "x") in expected.traffic()


def test_a_machine_says_whether_the_step_fits() -> None:
    """Oracle: the peak that is printed; a GPU of 80 GiB holds it, and of a model of 70B on two ranks it does not."""
    options = "--grid 2x1x1x1 --seq-len 32 --ranks 0 --machine h100"
    told = CliRunner().invoke(cli.app, ["dryrun", "--model", "tiny", *options.split()]).stdout
    assert "dgx-h100: the step fits: rank 0 needs 2.0 of 80 GiB" in told, told
    told = CliRunner().invoke(cli.app, ["dryrun", "--model", "Llama-2-70b-hf", *options.split()]).stdout
    need = float(re.search(r"the step does not fit: rank 0 needs ([\d.]+) of 80 GiB", told)[1])
    assert need > 70e9 / 2 * 16 / 2**30 and "docs/memory.md" in told, told
    found = CliRunner().invoke(cli.app, ["dryrun", "--model", "tiny", *options.split(), "--machine", "h1000"])
    assert found.exit_code == 2 and "h1000" in found.stderr and found.stderr.count("\n") == 1, found.stderr


def test_a_configuration_of_litgpts_says_what_a_step_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "pretrain.yaml"
    train = {"global_batch_size": 8, "micro_batch_size": 2, "max_seq_length": 64}

    def run(*arguments: str, **changes: Any) -> Any:
        content = {"model_name": "pythia-14m", "precision": "bf16-true", "train": train} | changes
        file.write_text(yaml.safe_dump(content))
        found = CliRunner().invoke(cli.app, ["dryrun", "--grid", "1x1x2x1", *arguments])
        records = json.loads(found.stdout)["records"] if found.exit_code == 0 else []
        return [record | {"seconds": 0} for record in records] or found.stderr

    plain = "--model pythia-14m --seq-len 64 --batch-size 8 --accumulate 2 --precision bf16-true --ranks 1 --json -"
    same = [run(*options) for options in (plain.split(), ("--litgpt", str(file), "--ranks", "1", "--json", "-"))]
    assert same[0] == same[1]
    assert "no option --model_nam" in run("--litgpt", str(file), model_nam="pythia-14m")
    assert "does not know tie_embeddings: true" in run("--litgpt", str(file), train=train | {"tie_embeddings": True})
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "jsonargparse", None)
        without.delitem(sys.modules, "axo.integrations.litgpt.parsing", raising=False)
        without.delattr("axo.integrations.litgpt.parsing", raising=False)
        assert "this needs LitGPT; install it with: pip install 'axo[litgpt]'" in run("--litgpt", str(file))
    train["micro_batch_size"] = 3
    assert "global_batch_size=8 does not divide over 2 data ranks" in run("--litgpt", str(file))
    file.write_text("{model_name: pythia-14m, train: {global_batch_size: 8, micro_batch_size: 2}}")
    assert _of_litgpt(file, "", {"block_size": "48"}, 2)["seq_len"] == 48


def handler_of_sigterm(config: TrainConfig, rank: int) -> Any:
    return signal.getsignal(signal.SIGTERM)


def test_sigterm_ends_the_processes_whatever_it_does_in_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    monkeypatch.setattr(sys.modules["axo.dryrun.compare"], "run", handler_of_sigterm)
    try:
        assert dryrun.run_all(config("2x1x1x1"), [0, 1], processes=2) == [signal.SIG_DFL] * 2
    finally:
        signal.signal(signal.SIGTERM, before)


def killed(config: TrainConfig, rank: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def mistaken(config: TrainConfig, rank: int) -> None:
    raise TypeError("a mistake")


@pytest.mark.parametrize(("what", "message"), [(killed, "was killed by SIGKILL; is there"), (mistaken, "a mistake")])
def test_a_process_without_an_answer_is_named(what: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["axo.dryrun.compare"], "run", what)
    with pytest.raises(RankFailed, match=message) as error:
        dryrun.run_all(config("2x1x1x1"), [0, 1], processes=2)
    assert f"rank {error.value.rank}" in str(error.value) and ("Traceback" in error.value.trace) == (what is mistaken)


@pytest.mark.soak
def test_4096_ranks_in_a_minute() -> None:
    started = time.perf_counter()
    case = TrainConfig(
        model="Llama-3-70B", grid=Grid(4, 2, 32, 16), batch_size=512, seq_len=2048, recompute=True, gather_cache="none"
    )
    roles = dryrun.representatives(case)
    records = dryrun.run_all(case, roles)
    assert dryrun.compare(case, records) == []
    seconds = time.perf_counter() - started
    mine, largest = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    kib = mine + len(os.sched_getaffinity(0)) * largest  # a process a core
    line = {"proof": "dry run", "model": case.model, "grid": str(case.grid), "ranks": case.grid.world_size}
    line |= {"roles": sum(count > 0 for count in roles.values()), "run": len(records), "seconds": round(seconds, 1)}
    print("\n" + json.dumps(line | {"peak_gib": round(kib / 2**20, 2)}))
    assert seconds < 60 and kib < 4 * 2**20
