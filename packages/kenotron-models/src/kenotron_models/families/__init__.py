"""One file for each family: the keys of its config, its blocks, and its names elsewhere."""
