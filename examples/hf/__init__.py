"""A Hugging Face model under accelerate on a grid of ranks."""
