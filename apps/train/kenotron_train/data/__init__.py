"""What the stages of a run read, and how a checkpoint names it."""
