"""How the next token is chosen: a request's settings, their place in the arrays, and the choice."""
