"""What is recorded or explained when a step, a device or a file fails."""
