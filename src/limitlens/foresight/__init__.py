"""Every head of a model from a pilot alone: `predict.predict` foretells, `prediction.Predictions` holds and shows."""
