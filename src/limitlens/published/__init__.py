"""Published experiments by name, with their parameters and claims, which `limitlens.reproduce` runs again."""
