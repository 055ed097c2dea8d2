"""Real transformers: models by name, text as windows, and the queries, keys and values of every head.

The road of the data: `load` a model, `open_corpus` a text, cut it into `Windows`, run the model over them inside
`capture`.
"""

from limitlens.models.capture import Captured, capture
from limitlens.models.catalog import ALIASES, LoadedModel, load
from limitlens.models.corpora import BUILT_IN, Corpus, open_corpus
from limitlens.models.projections import Projections, projections
from limitlens.models.windows import Windows, choose

__all__ = [
    "ALIASES", "BUILT_IN", "Captured", "Corpus", "LoadedModel", "Projections", "Windows", "capture", "choose", "load",
    "open_corpus", "projections",
]  # fmt: skip
