"""Distributed matrix products: the algorithm, its communication, and what it costs."""
