"""What a run prints, writes and measures, and pages made of that."""
