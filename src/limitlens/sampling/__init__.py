"""How tokens reach cells: nested sizes (`cells`), replayable `streams`, and `dealing` a stream in one pass."""
