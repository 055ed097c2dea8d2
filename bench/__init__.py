"""Benchmarks of speed and memory, as ratios of alternating measurements in one run: `python -m bench [name ...]`."""
