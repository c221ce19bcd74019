"""Choice of a layout: memory and time of every legal one, by the costs of the code that trains."""
