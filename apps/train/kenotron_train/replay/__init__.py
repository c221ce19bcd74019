"""A step of a run made again, and compared with what the run had."""
