"""An attention head: maps from tokens to queries, keys and values, and from queries to tilts."""

from __future__ import annotations

from typing import Any

import numpy as np

from limitlens.arrays import Tensor, torch
from limitlens.errors import Array, InputError, as_array, check_number


class Head:
    """One attention head, linear in its tokens.

    The score of token y for query x is <y, A x>, so attention over a law of tokens depends on a query only through its
    tilt t = A x. The value of token y is V y. Both are kept factored: A = Wkᵀ Wq is never formed if the head dimension
    k is smaller than d (`Head.from_projections`).

    The score matrix A (d, d) includes the factor 1/√k; a scalar means that multiple of the identity (of V's dimension,
    else d = 1). The value matrix V (v, d) is the identity by default.

    >>> head = ll.Head(1.5)
    >>> head.A.tolist(), head.V.tolist()
    ([[1.5]], [[1.0]])
    """

    def __init__(self, A: Any, V: Any = None) -> None:
        score = as_array("A", A, ndim=(0, 2))
        value = None if V is None else as_array("V", V, ndim=(0, 2))
        dims = [m.shape[1] for m in (score, value) if m is not None and m.ndim == 2]
        dim = dims[0] if dims else 1
        score = score * np.eye(dim) if score.ndim == 0 else score
        value = value * np.eye(dim) if value is not None and value.ndim == 0 else value
        if score.shape[0] != score.shape[1]:
            raise InputError(f"A has shape {score.shape}; expected a square matrix (dim, dim)")
        self._set(query_map=score, key_map=None, value_map=value)

    @classmethod
    def from_projections(
        cls,
        Wq: Any,
        Wk: Any,
        Wv: Any = None,
        *,
        query_bias: Any = None,
        value_bias: Any = None,
        head_dim: int | None = None,
    ) -> Head:
        """Head from projections q = Wq x + query_bias, k = Wk y, v = Wv y + value_bias, scores <q, k>/√head_dim.

        Rows of Wq, Wk (k, d) and Wv (v, d) are output features, as in `torch.nn.Linear.weight`; by default Wv is the
        identity and head_dim the number of rows. A query bias (k,) shifts every tilt by Wkᵀ query_bias/√k. A key bias
        adds the same number to all scores of a query and cancels in the softmax, so there is no argument for it.
        """
        query, key = as_array("Wq", Wq, ndim=2), as_array("Wk", Wk, ndim=2)
        if query.shape[0] != key.shape[0]:
            raise InputError(f"Wq has {query.shape[0]} rows and Wk {key.shape[0]}; expected the same head dimension")
        rows = len(query) if head_dim is None else int(head_dim)
        width = check_number("head_dim", rows, "a positive integer, such as the number of rows of Wq", low=1)
        head = cls.__new__(cls)
        head._set(
            query_map=query / np.sqrt(width),
            key_map=key,
            value_map=None if Wv is None else as_array("Wv", Wv, ndim=2),
            query_bias=None if query_bias is None else as_array("query_bias", query_bias, ndim=1) / np.sqrt(width),
            value_bias=None if value_bias is None else as_array("value_bias", value_bias, ndim=1),
        )
        return head

    def _set(
        self,
        query_map: Array,
        key_map: Array | None,
        value_map: Array | None,
        query_bias: Array | None = None,
        value_bias: Array | None = None,
    ) -> None:
        self.query_map, self.key_map, self.value_map = query_map, key_map, value_map
        self.key_dim, self.dim = query_map.shape
        self.value_dim = self.dim if value_map is None else value_map.shape[0]
        self.query_bias = np.zeros(self.key_dim) if query_bias is None else query_bias
        self.value_bias = np.zeros(self.value_dim) if value_bias is None else value_bias
        for name, matrix in (("the key map", key_map), ("the value map", value_map)):
            if matrix is not None and matrix.shape[1] != self.dim:
                given = f"{name} takes tokens of dimension {matrix.shape[1]} and the query map of dimension {self.dim}"
                raise InputError(f"{given}; expected the same")
        for name, bias, size in (("query", self.query_bias, self.key_dim), ("value", self.value_bias, self.value_dim)):
            if bias.shape != (size,):
                raise InputError(f"the {name} bias has shape {bias.shape}; expected ({size},)")

    @property
    def A(self) -> Array:
        """The score matrix (d, d), computed on access."""
        return self.query_map if self.key_map is None else np.asarray(self.key_map.T @ self.query_map)

    @property
    def V(self) -> Array:
        """The value matrix (v, d), computed on access."""
        return np.eye(self.dim) if self.value_map is None else self.value_map

    def tilts(self, x: Any) -> Array:
        """Tilts t = A x + Wkᵀ b of queries x: (..., d) to (..., d)."""
        queries = self.check_tokens("x", x) @ self.query_map.T + self.query_bias
        return np.asarray(queries if self.key_map is None else queries @ self.key_map)

    def check_tokens(self, name: str, tokens: Any) -> Array:
        """`tokens` as a finite array whose last axis is the head's dimension."""
        array = as_array(name, tokens)
        if array.ndim == 0 or array.shape[-1] != self.dim:
            raise InputError(f"{name} has shape {array.shape}; expected (..., {self.dim}), one row per token")
        return array

    def queries(self, x: Tensor) -> Tensor:
        """Queries of tokens x: (..., d) to (..., k), scale included."""
        return _affine(x, self.query_map, self.query_bias)

    def keys(self, tokens: Tensor) -> Tensor:
        """Keys of tokens: (..., d) to (..., k)."""
        return tokens if self.key_map is None else _affine(tokens, self.key_map, None)

    def values(self, tokens: Tensor) -> Tensor:
        """Values of tokens: (..., d) to (..., v)."""
        return tokens if self.value_map is None else _affine(tokens, self.value_map, self.value_bias)

    def __repr__(self) -> str:
        return f"Head(dim={self.dim}, key_dim={self.key_dim}, value_dim={self.value_dim})"


def as_head(head: Any, dim: int | None = None) -> Head:
    """`head`, checked to be a Head, and to have dimension `dim` if given; else an InputError."""
    if not isinstance(head, Head):
        raise InputError(f"the head is a {type(head).__name__}; expected a Head, second after a measure or tokens")
    if dim is not None and dim != head.dim:
        raise InputError(f"the measure has dimension {dim} and the head {head.dim}; expected the same")
    return head


def _affine(x: Tensor, matrix: Array, bias: Array | None) -> Tensor:
    result = x @ torch.as_tensor(matrix, dtype=x.dtype, device=x.device).T
    if bias is not None and bias.any():
        result = result + torch.as_tensor(bias, dtype=x.dtype, device=x.device)
    return result
