"""Training of the head: on what the model says, to say what it would say next."""
