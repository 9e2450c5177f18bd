"""The choice of the next token: a request's settings, their place in the arrays, and the choice itself."""
