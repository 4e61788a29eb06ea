"""A Vision Transformer on hand-written digits, on one rank and on grids of ranks: see README.md."""
