"""Proof tools, which the wheel leaves out: a process group with the semantics of NCCL."""
