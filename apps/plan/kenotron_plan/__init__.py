"""Plan trainings: does it fit, which layout, what limits it."""
