"""The matrix product in the layouts NN, NT and TN: checks, tile configurations, kernels."""
