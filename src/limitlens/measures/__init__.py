"""Probability distributions of tokens X: samplers, and K(t) = log E exp<t, X> with its derivatives."""

from limitlens.measures.base import Measure
from limitlens.measures.custom import TokenLaw, as_measure
from limitlens.measures.discrete import Discrete, Sample
from limitlens.measures.gaussian import Gaussian, GaussianMixture
from limitlens.measures.sphere import Ball, Cube, Sphere, VonMisesFisher

__all__ = [
    "Ball", "Cube", "Discrete", "Gaussian", "GaussianMixture", "Measure", "Sample", "Sphere", "TokenLaw",
    "VonMisesFisher", "as_measure",
]  # fmt: skip
