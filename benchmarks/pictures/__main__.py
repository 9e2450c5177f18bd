"""`python -m benchmarks.pictures`: draw the pictures of the lessons again."""

import sys

from benchmarks.pictures import main

sys.exit(main(sys.argv[1:]))
