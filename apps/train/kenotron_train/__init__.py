"""Training from a YAML file."""
