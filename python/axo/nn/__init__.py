"""Parallel layers that stand in for those of ``torch.nn``: same names and arguments, this rank's shards inside.

What moves between ranks is in ``axo.matmul``; where a tensor lies is in ``axo.placement``.
"""

from axo.nn.init import init_weights
from axo.nn.layer import ParallelLayer
from axo.nn.linear import Linear

__all__ = ["Linear", "ParallelLayer", "init_weights"]
