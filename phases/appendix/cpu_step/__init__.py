"""A decode step on a CPU is one call: its operators are tasks of one C++ function that all threads share."""
