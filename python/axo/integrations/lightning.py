"""The name that docs give the Fabric strategy's module."""

from axo.integrations.fabric.strategy import AxoStrategy, register

__all__ = ["AxoStrategy", "register"]
