"""Statistics of samples: bootstrap, error curves and their rates, crossings, tail tests and local exponents."""
