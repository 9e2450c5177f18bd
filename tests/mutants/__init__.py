"""Mutants: small mistakes made from the syntax tree, and whether a phase's own tests notice them."""
