"""Attention heads, random heads of a given strength, and the output of a head over infinitely many tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike

from limitlens.arrays import Tensor, torch
from limitlens.errors import Array, InputError, as_array, check_covariance, check_number, check_seed
from limitlens.measures.custom import TokenLaw, as_measure

HARDMAX_BEYOND = 10_000  # largest horizon of `designed_head`: attention over 30,000 tokens is hardmax long before


class Head:
    """One attention head: for the query x, token y has the score <y, A x> and the value V y.

    The score matrix A (d, d) includes the factor 1/√head_dim. The value matrix V (v, d) is the identity by default. A
    scalar means that multiple of the identity. `Head.from_projections` makes a head from the weights Wq, Wk and Wv.

    >>> head = ll.Head(1.5)
    >>> head.A.tolist(), head.V.tolist()
    ([[1.5]], [[1.0]])
    """

    def __init__(self, A: Any, V: Any = None) -> None:
        score = as_array("A", A, ndim=(0, 2))
        value = None if V is None else as_array("V", V, ndim=(0, 2))
        dims = [matrix.shape[1] for matrix in (score, value) if matrix is not None and matrix.ndim == 2]
        identity = np.eye(dims[0] if dims else 1)
        score = score * identity if score.ndim == 0 else score
        if score.shape[0] != score.shape[1]:
            raise InputError(f"A has shape {score.shape}; expected a square matrix (dim, dim)")
        self._set(score, None, value * identity if value is not None and value.ndim == 0 else value)

    @classmethod
    def from_projections(
        cls, Wq: Any, Wk: Any, Wv: Any = None,
        *, query_bias: Any = None, value_bias: Any = None, head_dim: int | None = None,
    ) -> Head:  # fmt: skip
        """Make a head from its projections q = Wq x + query_bias, k = Wk y and v = Wv y + value_bias.

        Scores are <q, k>/√head_dim. Rows of Wq, Wk (k, d) and Wv (v, d) are output features, as in `torch.nn.Linear`.
        By default Wv is the identity and head_dim is k. A key bias would cancel in the softmax, so it is no argument.
        """
        query, key = as_array("Wq", Wq, ndim=2), as_array("Wk", Wk, ndim=2)
        if query.shape[0] != key.shape[0]:
            raise InputError(f"Wq has {query.shape[0]} rows and Wk {key.shape[0]}; expected the same head dimension")
        rows = len(query) if head_dim is None else int(head_dim)
        root = np.sqrt(check_number("head_dim", rows, "a positive integer, such as the number of rows of Wq", low=1))
        value = None if Wv is None else as_array("Wv", Wv, ndim=2)
        if value is None and value_bias is not None:
            raise InputError("value_bias was given without Wv; expected both, so pass Wv = np.eye(d) for values V = I")
        biases = (("query_bias", query_bias), ("value_bias", value_bias))
        of_query, of_value = (None if bias is None else as_array(name, bias, ndim=1) for name, bias in biases)
        head = cls.__new__(cls)
        head._set(query / root, key, value, None if of_query is None else of_query / root, of_value)
        return head

    def _set(
        self, query_map: Array, key_map: Array | None, value_map: Array | None, query_bias: Array | None = None,
        value_bias: Array | None = None,
    ) -> None:  # fmt: skip
        self.query_map, self.key_map, self.value_map = query_map, key_map, value_map
        self.key_dim, self.dim = query_map.shape
        self.value_dim = self.dim if value_map is None else value_map.shape[0]
        self.query_bias = np.zeros(self.key_dim) if query_bias is None else query_bias
        self.value_bias = np.zeros(self.value_dim) if value_bias is None else value_bias
        for name, matrix in (("key", key_map), ("value", value_map)):
            if matrix is not None and matrix.shape[1] != self.dim:
                given = f"the {name} map takes tokens of dimension {matrix.shape[1]} and the query map of {self.dim}"
                raise InputError(f"{given}; expected the same")
        for name, bias, size in (("query", self.query_bias, self.key_dim), ("value", self.value_bias, self.value_dim)):
            if bias.shape != (size,):
                raise InputError(f"the {name} bias has shape {bias.shape}; expected ({size},)")

    @property
    def A(self) -> Array:
        """Score matrix A (d, d) of the head: the score of token y for query x is <y, A x>."""
        return self.query_map if self.key_map is None else np.asarray(self.key_map.T @ self.query_map)

    @property
    def V(self) -> Array:
        """Value matrix V (v, d) of the head: the value of token y is V y."""
        return np.eye(self.dim) if self.value_map is None else self.value_map

    def tilts(self, x: Any) -> Array:
        """Vectors t (..., d) that give the scores <y, t> of tokens y for queries x: t = A x plus any query bias."""
        queries = self.check_tokens("x", x) @ self.query_map.T + self.query_bias
        return np.asarray(queries if self.key_map is None else queries @ self.key_map)

    def check_tokens(self, name: str, tokens: Any) -> Array:
        """Return `tokens` as a finite array (..., dim of the head), or raise an `InputError` that calls them `name`."""
        array = as_array(name, tokens)
        if array.ndim == 0 or array.shape[-1] != self.dim:
            raise InputError(f"{name} has shape {array.shape}; expected (..., {self.dim}), one row per token")
        return array

    def queries(self, x: Tensor) -> Tensor:
        """Query vectors (..., k) of tokens x (..., d), with the scale 1/√head_dim included."""
        return _affine(x, self.query_map, self.query_bias)

    def keys(self, tokens: Tensor) -> Tensor:
        """Key vectors (..., k) of tokens (..., d)."""
        return tokens if self.key_map is None else _affine(tokens, self.key_map)

    def values(self, tokens: Tensor) -> Tensor:
        """Value vectors (..., v) of tokens (..., d)."""
        return tokens if self.value_map is None else _affine(tokens, self.value_map, self.value_bias)

    def __repr__(self) -> str:
        return f"Head(dim={self.dim}, key_dim={self.key_dim}, value_dim={self.value_dim})"


def _affine(x: Tensor, matrix: Array, bias: Array | None = None) -> Tensor:
    result = x @ torch.as_tensor(matrix, dtype=x.dtype, device=x.device).T
    return result if bias is None or not bias.any() else result + torch.as_tensor(bias, dtype=x.dtype, device=x.device)


def as_head(head: Any, dim: int | None = None) -> Head:
    """Return `head` if it is a `Head` (and has dimension `dim`, if given); otherwise raise an `InputError`."""
    if not isinstance(head, Head):
        raise InputError(f"the head is a {type(head).__name__}; expected a Head, second after a measure or tokens")
    if dim is not None and dim != head.dim:
        raise InputError(f"the measure has dimension {dim} and the head {head.dim}; expected the same")
    return head


def limit(measure: TokenLaw, head: Head, x: Any) -> Array:
    """Attention output over infinitely many tokens X for queries x (..., d): V ∇K(A x) (..., v), K(t) = log E exp<t,X>.

    >>> ll.limit(ll.Gaussian(0.0, 1.0), ll.Head(1.5), [[0.5], [1.0]]).tolist()
    [[0.75], [1.5]]
    """
    law = as_measure(measure)
    head = as_head(head, law.dim)
    mean = law.grad_K(head.tilts(x))
    return mean if head.value_map is None else np.asarray(mean @ head.value_map.T + head.value_bias)


def designed_head(
    measure: TokenLaw | ArrayLike, horizon: float, *, spectrum: str | Sequence[float] = "flat", seed: int = 0
) -> Head:
    """Make a random head of a given strength for tokens with covariance Σ: ‖Σ^{1/2} A Σ^{1/2}‖ = `horizon` and V = I.

    `measure` is a distribution of tokens, or Σ (d, d). Σ^{1/2} A Σ^{1/2} is R diag(s), R a uniformly random rotation.
    The `spectrum` s is "flat", "1/k" or d numbers, rescaled to the maximum `horizon`. Directions without variance are
    ignored.

    >>> ll.designed_head(ll.Gaussian(0.0, 4.0), horizon=2.0).A.tolist()
    [[0.5]]
    """
    wanted = f"a number from 0 to {HARDMAX_BEYOND:,}, such as 1.5: far beyond, attention is hardmax"
    check_number("the horizon", horizon, wanted, below=HARDMAX_BEYOND * (1 + 1e-9))
    check_seed(seed)
    if hasattr(measure, "grad_K"):
        law = as_measure(cast("TokenLaw", measure))
        law.check_spread()
        covariance = law.covariance
    else:
        covariance = check_covariance("covariance", as_array("covariance", measure, ndim=2))
    dim = len(covariance)
    shapes = {"flat": np.ones(dim), "1/k": 1 / np.arange(1, dim + 1)}
    if isinstance(spectrum, str) and spectrum not in shapes:
        raise InputError(f"the spectrum is {spectrum!r}; expected flat, 1/k or {dim} numbers")
    shape = shapes[spectrum] if isinstance(spectrum, str) else as_array("the spectrum", spectrum)
    if shape.shape != (dim,) or not np.isfinite(shape).all() or (shape < 0).any() or not shape.any():
        wanted = f"{dim} finite numbers >= 0, not all zero, one for each dimension"
        raise InputError(f"the spectrum of A has {shape.size} entries; expected {wanted}")
    values, vectors = np.linalg.eigh(covariance)
    keep = values > 1e-12 * max(values.max(), 1e-300)
    inverse_root = (vectors[:, keep] / np.sqrt(values[keep])) @ vectors[:, keep].T
    whitened = random_rotation(dim, seed) * (horizon * shape / shape.max())
    return Head(inverse_root @ whitened @ inverse_root)


def random_rotation(dim: int, seed: int) -> Array:
    """Random rotation matrix (dim, dim), uniformly distributed on the rotation group SO(dim)."""
    generator = np.random.default_rng(np.random.SeedSequence([seed, 0x2071]))
    orthogonal, triangular = np.linalg.qr(generator.standard_normal((dim, dim)))
    orthogonal *= np.sign(np.diag(triangular))
    if np.linalg.det(orthogonal) < 0:
        orthogonal[:, 0] *= -1
    return np.asarray(orthogonal)
