"""Output of a run while it trains: lines, metrics.jsonl, trackers, times and profiles."""
