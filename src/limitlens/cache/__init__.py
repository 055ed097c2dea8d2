"""KV budgets from a run: `plan` says what each head needs for an error, `trial` tries it."""
