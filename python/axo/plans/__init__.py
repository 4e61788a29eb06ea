"""Plans: which parallel layer stands for which module of a known model."""
