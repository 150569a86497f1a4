"""Planted faults: are the tests of the core worth anything? `make mutants`."""
