"""What several files compare with: one run of ``axo litgpt pretrain`` a worker, however often its tests come back."""

import pytest

from tests.integrations.runs import finish, losses_of


@pytest.fixture(scope="session")
def whole(folder):
    """A run that nothing disturbs."""
    outcome, state = finish(folder, "whole")
    assert outcome.ok, outcome.describe() + outcome.output
    assert "axo litgpt: grid 2x1x2x1: 4 ranks, which read each batch in 2 parts" in outcome.output
    assert outcome.output.count("Initializing distributed") == 1  # each rank starts alike, and one says so
    said = (folder / "whole" / "final" / "hyperparameters.yaml").read_text()
    assert said.startswith("# axo litgpt --grid 2x1x2x1\n") and "devices: 2" in said
    return losses_of(folder, "whole"), state
