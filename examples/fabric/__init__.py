"""A Fabric program on a grid of ranks."""
