"""Tools: functions that a model may call, by writing JSON that its chat template has taught it."""
