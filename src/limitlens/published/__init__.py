"""Published experiments by name: their parameters, what they claim, and what comes out here (`limitlens.reproduce`)."""
