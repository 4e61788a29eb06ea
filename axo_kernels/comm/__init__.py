"""What fused operations want of a communicator, and what adapts one to it."""
