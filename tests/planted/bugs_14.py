"""Mistakes in phase 14, parallel. The first two are planted on every run of the test suite."""

from tests.planted.ranks import RANKS
from tests.planted.replicas import REPLICAS

BUGS = REPLICAS + RANKS
