"""How every head of a model is measured in one pass over a corpus: `probe.probe`, from the pilot to the records."""
