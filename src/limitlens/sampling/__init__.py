"""Random samples of tokens at several nested sizes, with checkpoints, worker threads and memory limits."""
