"""Distributed matrix products: the algorithms by name, what each sends, and the product that the layers run.

What this loads is arithmetic: an algorithm uses the methods of the tensors that it is given; planning needs no torch.
"""

from axo.matmul.algorithm import Algorithm, Layout, Shape, Transfer
from axo.matmul.registry import algorithms

__all__ = ["Algorithm", "Layout", "Shape", "Transfer", "algorithms"]
