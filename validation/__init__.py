"""Slow checks of correctness: coverage of intervals, predictions, resumed runs, fuzzing, figures of the docs."""
