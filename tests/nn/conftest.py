"""Fixtures of the layers' tests."""

from tests.kernels.conftest import interpreter

__all__ = ["interpreter"]
