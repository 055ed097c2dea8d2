"""What a person runs on a live model: `trial` proves a plan of the cache by the model's own predictions."""
