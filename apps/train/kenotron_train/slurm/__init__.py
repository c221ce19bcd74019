"""A training as a job of Slurm."""
