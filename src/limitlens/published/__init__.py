"""Published experiments by name, with their parameters, their claims and our numbers (`limitlens.reproduce`)."""
