"""Every head of a model: measured in one pass over a corpus (`probe`), or predicted from a pilot (`predict`)."""
