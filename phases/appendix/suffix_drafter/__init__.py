"""A drafter that compares the whole past, of other requests as well: a suffix automaton."""
