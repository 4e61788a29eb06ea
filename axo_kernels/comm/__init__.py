"""What fused operations need from a communicator, and the adapters that provide it."""
