"""Heads with LoRA or scales around them, whose logits never exist whole, against serial LitGPT's on whole logits."""

import pytest
from torch.utils.checkpoint import checkpoint

import axo
from axo.matmul import cost
from axo.nn.linear_loss import linear_cross_entropy, linear_cross_entropy_cost, without_head
from tests.gpt import batch
from tests.launcher import run_ranks
from tests.nn.support import Largest, assert_counted, assert_gradients_match, my_rows, seed_apart
from tests.plans import test_litgpt_adapters as adapters
from tests.plans import test_litgpt_lora as lora

# A head with LoRA and a bias, wrapped alone, with scales and shifts.
CASES = [(lora, "neox", 1), (lora, "default", 1), (adapters, "scales", 2)]
OF_WEIGHTS = (cost.SCATTER_WEIGHT_GRAD, cost.REDUCE_WEIGHT_GRAD)  # the head itself is frozen


def compare(grid):
    comms = axo.connect(grid)
    for module, case, place in CASES:
        gradients, model = module.expected_of(case)[place], module.serial_model(case)
        seed_apart(comms)
        axo.parallelize(model, comms, overlap=axo.Overlap(bucket_bytes=0))
        head = model.lm_head
        ids, targets = (my_rows(comms, each) for each in batch(model.config, 0))
        for reduction, recompute in (("mean", False), ("none", False), ("mean", True)):

            def loss_of(hidden, head=head, targets=targets, reduction=reduction):
                return linear_cross_entropy(hidden, head, targets, reduction=reduction, chunk_rows=7).mean()

            with without_head(model):
                hidden = model(ids)
            leaf = hidden.detach().requires_grad_()
            with Largest() as seen, axo.count_collectives() as counts:
                loss = checkpoint(loss_of, leaf, use_reentrant=False) if recompute else loss_of(leaf)
                loss.backward()
            hidden.backward(leaf.grad)
            block = 51 * 64 if comms.grid.x > 1 else 101 * 64
            assert seen.elements <= max(block, hidden.numel()) < targets.numel() * 101 // comms.grid.x
            assert_gradients_match(model, gradients, 1e-5, f"{case} at {grid}, {reduction}, again {recompute}")
            if (reduction, recompute) == ("mean", False):
                rows = targets.numel() * comms.grid.z
                base = linear_cross_entropy_cost(head.linear, rows, chunk_rows=7)
                base = [call for call in base if call.purpose not in OF_WEIGHTS]
                assert_counted(counts, [*base, *head.cost(rows)])
            model.zero_grad()
            adapters.forget_prompt(model)


@pytest.mark.parametrize("grid", ["1x1x2x1", "2x2x2x1"])
def test_losses_in_chunks_equal_serial(grid):
    run_ranks(compare, axo.Grid.parse(grid).world_size, grid, timeout=120)
