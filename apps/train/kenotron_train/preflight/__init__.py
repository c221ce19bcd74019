"""Measuring the machines of a run before it starts."""
