"""Matrix products in the layouts NN, NT and TN, fused with chunked communication, and the tuner that chooses."""

from axo_kernels.comm import Communicator, FusedCommunicator, Ran, SignalTimeout, adapt
from axo_kernels.fused import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from axo_kernels.gemm import matmul
from axo_kernels.goldfish import goldfish_mask, goldfish_targets
from axo_kernels.tuner import Tuner

__all__ = [
    "Communicator",
    "FusedCommunicator",
    "Ran",
    "SignalTimeout",
    "Tuner",
    "adapt",
    "all_gather_matmul",
    "goldfish_mask",
    "goldfish_targets",
    "matmul",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
]
