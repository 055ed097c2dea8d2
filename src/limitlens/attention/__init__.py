"""Attention: heads, their outputs over n and over infinitely many tokens, mergeable states, key policies, kernels."""
