"""Error curves of every head of a model: measured on a corpus (`probe`), or predicted from few tokens (`predict`)."""
