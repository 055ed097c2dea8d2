"""How tokens reach cells: nested sizes, iid streams, draws without replacement, dealing a stream in one pass."""

from limitlens.sampling.cells import Cells, parse_sizes
from limitlens.sampling.dealing import assign, deal
from limitlens.sampling.streams import IidStream, PoolStream, Stream

__all__ = ["Cells", "IidStream", "PoolStream", "Stream", "assign", "deal", "parse_sizes"]
