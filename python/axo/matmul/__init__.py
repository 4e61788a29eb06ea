"""Distributed matrix products: the algorithms by name, what each sends, and the product that the layers run.

    algorithm, registry, axonn, summa, ...    the algorithms that layers train with, on plain matrices
    product, blocks                           the product of a layer over ranks, with autograd: axonn's, and Tesseract's
    products                                  its three products on one rank, as the tuner chose
    fused                                     those that run chunk by chunk with their collective
    shared_input                              the gradient of an input that several layers take, summed once
    cost, engine_cost                         what a layer sends, counted without running it

What this loads is arithmetic: an algorithm uses the methods of the tensors that it is given; planning needs no torch.
"""

from axo.matmul.algorithm import Algorithm, Layout, Shape, Transfer
from axo.matmul.registry import algorithms

__all__ = ["Algorithm", "Layout", "Shape", "Transfer", "algorithms"]
