"""Other projects' tests of their servers, run against ours: `python -m tests.foreign SUITE CHECKOUT`.

Nothing of theirs is here: the script is given a checkout, runs chosen files of it in their own words, and
writes down which cases passed, and why the others did not (`results.json`).
"""
