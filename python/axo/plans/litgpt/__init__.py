"""The plan for LitGPT's models."""
