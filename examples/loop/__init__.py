"""A training loop of one's own, as torchtitan writes it, on a grid of ranks."""
