"""Decode steps on a CPU as one call of a C++ function, whose threads share the operators' tasks."""
