"""Replicas: one server copied over many GPUs and machines, and who gets which request."""
