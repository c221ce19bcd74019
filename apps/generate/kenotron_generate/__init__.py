"""Continue prompts from checkpoints."""
