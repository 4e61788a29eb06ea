"""Matrix products in the layouts NN, NT and TN, fused with chunked communication, and the tuner that chooses."""

from axo_kernels.comm.adapters import adapt
from axo_kernels.comm.communicator import FusedCommunicator, FusedRun
from axo_kernels.comm.host_stream import SignalTimeout
from axo_kernels.fused.operations import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from axo_kernels.gemm.matmul import matmul
from axo_kernels.tune.tuner import Tuner

__all__ = [
    "FusedCommunicator",
    "FusedRun",
    "SignalTimeout",
    "Tuner",
    "adapt",
    "all_gather_matmul",
    "matmul",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
]
