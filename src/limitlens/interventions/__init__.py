"""What a person runs on a live model: plans of its cache tried, and factors on its scores beyond its context."""
