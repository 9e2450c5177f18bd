"""Libraries that make masks. Each is imported when an engine first needs it."""
