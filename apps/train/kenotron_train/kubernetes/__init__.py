"""A training as a job of Kubernetes."""
