"""What a sample tells of its law: the local exponent of keys around a query, and how heavy its tails are."""
