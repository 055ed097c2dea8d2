"""Real transformers: load a model, cut text into windows, and read or change queries, keys and values of its heads."""

from limitlens.models.catalog import ALIASES, LoadedModel, load
from limitlens.models.corpora import BUILT_IN, Corpus, open_corpus
from limitlens.models.intervene import intervene
from limitlens.models.projections import Projections, projector
from limitlens.models.readers import READERS, Reader
from limitlens.models.relay import Captured, capture
from limitlens.models.windows import Windows, choose, resolve_source

__all__ = [
    "ALIASES", "BUILT_IN", "READERS", "Captured", "Corpus", "LoadedModel", "Projections", "Reader", "Windows",
    "capture", "choose", "intervene", "load", "open_corpus", "projector", "resolve_source",
]  # fmt: skip
