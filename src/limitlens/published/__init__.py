"""Published experiments by name, with their parameters and claims, and our own numbers (`limitlens.reproduce`)."""
