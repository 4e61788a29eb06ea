"""Which way of computing a product is fastest here: measured once, kept on disk."""
