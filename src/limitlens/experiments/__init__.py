"""What a person runs on a law of tokens: studies, sweeps, hardmax, heavy tails, scaling limits, the heat flow."""
