"""Products that run chunk by chunk with their communication."""
