"""Laws of tokens: sampling, the cumulant generating function K and its derivatives."""
