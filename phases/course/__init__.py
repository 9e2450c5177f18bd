"""Coursework: exercises made from the reference itself, checked and graded against its tests.

Nothing here is needed to run the engine. The exercises are data beside each lesson (`exercises.toml`). This
package blanks their functions (`blanks`), lays a working copy out (`making`), puts a student's functions into
a copy of the reference, runs cases and tests there in processes (`fork_server`, `grading_process`) that the
operating system confines (`sandbox`), and judges what these say (`checking`).
"""
