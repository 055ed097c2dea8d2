"""Real transformers: models by name, text as windows, and the queries, keys and values of every head.

The road of the data: `load` a model, `open_corpus` a text, cut it into `Windows`, run the model over them inside
`capture`, or inside `intervene` to see what it does with other keys or scores.
"""

from limitlens.models.capture import capture
from limitlens.models.catalog import ALIASES, LoadedModel, load
from limitlens.models.corpora import BUILT_IN, Corpus, open_corpus
from limitlens.models.intervene import intervene
from limitlens.models.projections import Projections, projections, projector
from limitlens.models.relay import Captured
from limitlens.models.source import resolve_source
from limitlens.models.windows import Windows, choose

__all__ = [
    "ALIASES",
    "BUILT_IN",
    "Captured",
    "Corpus",
    "LoadedModel",
    "Projections",
    "Windows",
    "capture",
    "choose",
    "intervene",
    "load",
    "open_corpus",
    "projections",
    "projector",
    "resolve_source",
]  # fmt: skip
