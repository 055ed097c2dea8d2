"""Real transformers: load models by name, cut text into windows, and read queries, keys and values of every head.

`load` loads a model, `open_corpus` opens a text, `Windows` cuts it into windows of tokens. Run the model within
`capture` to read the queries, keys and values of its heads, or within `intervene` to change its keys or scores.
"""

from limitlens.models.catalog import ALIASES, LoadedModel, load
from limitlens.models.corpora import BUILT_IN, Corpus, open_corpus
from limitlens.models.intervene import intervene
from limitlens.models.projections import Projections, projector
from limitlens.models.relay import Captured, capture
from limitlens.models.windows import Windows, choose, resolve_source

__all__ = [
    "ALIASES", "BUILT_IN", "Captured", "Corpus", "LoadedModel", "Projections", "Windows", "capture", "choose",
    "intervene", "load", "open_corpus", "projector", "resolve_source",
]  # fmt: skip
