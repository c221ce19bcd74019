"""A run from its start to its end: what it needs, its loop, its checkpoints."""
