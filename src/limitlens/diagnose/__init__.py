"""Verdicts on heads: where a real head stands among the laws of the theory."""
