"""The default backend of grammars: llguidance, and what makes its masks cost a step nothing."""
