"""Matrix products in the layouts NN, NT and TN, fused with chunked communication, and the tuner that chooses."""

from axo_kernels.gemm import matmul

__all__ = ["matmul"]
