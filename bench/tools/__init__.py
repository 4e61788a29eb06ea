"""Tools of the benches: kernels compiled without a GPU and read as assembly."""
