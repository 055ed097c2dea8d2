"""Every head of a model in one pass over a corpus: `probe.probe` measures, `record.HeadRecord` holds one head."""
