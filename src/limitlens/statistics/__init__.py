"""Statistics of measured errors: bootstrap intervals, rates of decay, tokens needed for an error, tests of tails."""
