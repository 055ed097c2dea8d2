"""What was found of the heads of a model: `record.HeadRecord` holds one, `result.ProbeRun` all, and what they show."""
