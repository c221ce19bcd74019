"""Pages and tables of finished or running runs, drawn from what they wrote."""
