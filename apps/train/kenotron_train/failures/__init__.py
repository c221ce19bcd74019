"""Records and explanations of a step, a device or a file that fails."""
