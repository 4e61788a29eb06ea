"""Inputs of the trainer's tests."""

import pytest

from tests.integrations.trainer import write_inputs


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A folder with a text and a tokenizer, where runs also leave their output."""
    path = tmp_path_factory.mktemp("litgpt")
    write_inputs(path)
    return path
