"""How the head and the two layers are trained: on what the model says, to say what it would say next."""
