"""Evaluations: perplexity of held-out samples, and tasks of lm-eval on the layout as it is."""
