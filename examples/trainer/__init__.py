"""One model under Lightning's Trainer and under Hugging Face's, on a grid of ranks."""
