"""Grammars by hand: regular expressions, automata over bytes, and a stack for what nests."""
