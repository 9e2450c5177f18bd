"""Coursework: exercises made from the reference itself, checked and graded against its tests.

Nothing here is needed to run the engine. The exercises are data beside each lesson (`exercises.toml`). This
package blanks their functions (`blanks`), lays a working copy out (`making`), puts a student's functions into
a fresh copy of the reference (`overlay`), and runs tests there in a process of their own (`nursery`,
`inside`).
"""
