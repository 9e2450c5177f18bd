"""The default grammar backend: llguidance, whose masks are made while the engine does other work."""
