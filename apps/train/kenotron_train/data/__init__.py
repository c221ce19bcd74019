"""Data of the stages of a run, and their names in a checkpoint."""
