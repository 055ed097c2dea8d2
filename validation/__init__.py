"""Checks of correctness that take longer than the tests: coverage of intervals, predictions, kills, fuzzing, figures."""
