"""Softmax attention over n tokens or infinitely many: heads, kernels, mergeable results, rules that select keys."""
