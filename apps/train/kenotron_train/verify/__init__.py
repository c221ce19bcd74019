"""A layout compared with one process, on a small copy of its config."""
