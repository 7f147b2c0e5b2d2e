"""Checks that ship: the self-test and the statistics of rounding."""
