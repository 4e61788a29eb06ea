"""Matrix products in the layouts NN, NT and TN, fused with chunked communication, and the tuner that chooses."""

from axo_kernels.comm.adapters import Communicator, FusedCommunicator, Ran, SignalTimeout, adapt
from axo_kernels.fused.operations import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from axo_kernels.gemm.matmul import matmul
from axo_kernels.tune.tuner import Tuner

__all__ = [
    "Communicator",
    "FusedCommunicator",
    "Ran",
    "SignalTimeout",
    "Tuner",
    "adapt",
    "all_gather_matmul",
    "matmul",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
]
