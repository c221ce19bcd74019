"""What happens when a step, a device or a file fails, and how a step is made again."""
