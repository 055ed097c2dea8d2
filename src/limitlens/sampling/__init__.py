"""Sampling of tokens: nested sizes (`cells`), `streams`, `assignment` of tokens to cells, checkpoints and workers."""
