"""Measure (`probe`) or predict (`predict`), for every head of a model, the error of attention over n random tokens."""
