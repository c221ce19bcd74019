"""DoReMi (Xie et al., arXiv 2305.10429): weights of domains, learned by a small proxy model."""
