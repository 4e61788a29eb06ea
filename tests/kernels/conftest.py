"""Fixtures of the kernel tests."""

import pytest

from tests.kernels.interpreter import Interpreter


@pytest.fixture(scope="session")
def interpreter():
    """A process in which Triton kernels run on the CPU."""
    worker = Interpreter()
    yield worker
    worker.close()
