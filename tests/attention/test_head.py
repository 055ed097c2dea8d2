"""Attention heads: scores and values, the exact limit, attention over n tokens, and heads built for a given horizon."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

import limitlens as ll
from limitlens.attention.head import designed_head, random_rotation
from limitlens.errors import InputError
from limitlens.theory.clt import asymptotic_covariance
from limitlens.theory.spectrum import reach, whitened


def dense(tokens, A, V, x, shift=0.0):
    scores = (x @ A.T + shift) @ tokens.T
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True) @ tokens @ V.T


def test_attend_equals_dense_softmax_in_blocks():
    rng = np.random.default_rng(0)
    tokens, x, A, V = (
        rng.normal(size=(301, 3)),
        rng.normal(size=(7, 3)),
        rng.normal(size=(3, 3)),
        rng.normal(size=(2, 3)),
    )
    expected = dense(tokens, A, V, x)
    assert_allclose(ll.attend(tokens, ll.Head(A, V), x, block=37), expected, rtol=1e-12)
    assert_allclose(ll.attend(torch.tensor(tokens), ll.Head(torch.tensor(A), V), torch.tensor(x)), expected, rtol=1e-12)
    assert_allclose(ll.attend(tokens, ll.Head(A, V), x, precise=False), expected, atol=1e-5)


def test_projections_include_scale_and_query_bias_and_a_key_bias_cancels():
    rng = np.random.default_rng(1)
    Wq, Wk, Wv = (rng.normal(size=shape) for shape in ((4, 6), (4, 6), (3, 6)))
    bq, bk, bv = rng.normal(size=4), rng.normal(size=4), rng.normal(size=3)
    tokens, x = rng.normal(size=(50, 6)), rng.normal(size=(5, 6))
    scores = (x @ Wq.T + bq) @ (tokens @ Wk.T + bk).T / np.sqrt(4)
    weights = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    head = ll.Head.from_projections(Wq, Wk, Wv, query_bias=bq, value_bias=bv)
    assert_allclose(ll.attend(tokens, head, x), weights @ (tokens @ Wv.T + bv), rtol=1e-12)
    assert_allclose(head.A, Wk.T @ Wq / 2)
    assert_allclose(head.tilts(x), x @ head.A.T + bq @ Wk / 2)


def test_limit_of_a_gaussian_is_linear_and_attention_tends_to_it():
    rng = np.random.default_rng(2)
    root = rng.normal(size=(3, 3)) / 2
    mu = ll.Gaussian([0.5, 0, -1], root @ root.T)
    head = ll.Head(rng.normal(size=(3, 3)) / 3, rng.normal(size=(2, 3)))
    x = rng.normal(size=(4, 3))
    expected = (mu.mean + x @ head.A.T @ mu.covariance) @ head.V.T
    assert_allclose(ll.limit(mu, head, x), expected, rtol=1e-12)
    tokens = mu.sample(400_000, torch.Generator().manual_seed(0))
    spread = np.diagonal(asymptotic_covariance(mu, head.tilts(x), head.V), axis1=1, axis2=2) / len(tokens)
    gap = (ll.attend(tokens, head, x) - expected) / np.sqrt(spread)
    assert np.abs(gap).max() < 4


@pytest.mark.parametrize("spectrum", ["flat", "1/k", [3.0, 1.0, 0.5, 0.0]])
def test_designed_head_has_its_horizon_and_spectrum(spectrum):
    rng = np.random.default_rng(3)
    root = rng.normal(size=(4, 4))
    covariance = root @ root.T
    A = designed_head(covariance, 1.7, spectrum=spectrum, seed=5).A
    shape = {"flat": np.ones(4), "1/k": 1 / np.arange(1, 5)}.get(str(spectrum))
    shape = np.asarray(spectrum) / 3 if shape is None else shape
    assert_allclose(np.linalg.svd(whitened(covariance, A), compute_uv=False), 1.7 * shape, atol=1e-9)
    assert_allclose(reach(covariance, A).horizon, 1.7)


def test_rotations_are_rotations_and_one_dimension_keeps_its_sign():
    for dim in (2, 5):
        rotation = random_rotation(dim, 7)
        assert_allclose(rotation @ rotation.T, np.eye(dim), atol=1e-12)
        assert_allclose(np.linalg.det(rotation), 1)
    for seed in range(5):
        assert designed_head(np.eye(1), 2.0, seed=seed).A == [[2.0]]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ll.Head(np.ones((2, 3))), "square"),
        (lambda: ll.Head(np.eye(2), np.ones((2, 3))), "dimension 3"),
        (lambda: ll.Head([[np.nan]]), "finite"),
        (lambda: ll.Head.from_projections(np.ones((2, 3)), np.ones((4, 3))), "same head dimension"),
        (lambda: ll.Head.from_projections(np.eye(2), np.eye(2), head_dim=0), "head_dim"),
        (lambda: ll.Head.from_projections(np.eye(2), np.eye(2), query_bias=[1.0]), "query bias"),
        (lambda: ll.attend(np.zeros((0, 2)), ll.Head(np.eye(2)), np.zeros((1, 2))), "at least one row"),
        (lambda: ll.attend(np.full((3, 2), np.inf), ll.Head(np.eye(2)), np.zeros((1, 2))), "finite"),
        (lambda: ll.attend(np.zeros((3, 2)), ll.Head(np.eye(2)), np.zeros((1, 3))), "expected"),
        (lambda: ll.limit(ll.Gaussian(0.0, 1.0), ll.Head(np.eye(2)), np.zeros((1, 2))), "dimension"),
        (lambda: designed_head(np.eye(2), -1.0), "horizon is -1"),
        (lambda: designed_head(np.eye(2), 1.0, spectrum="steep"), "spectrum"),
        (lambda: designed_head(np.eye(2), 1.0, spectrum=[1.0]), "2 finite numbers"),
    ],
)
def test_bad_input_is_one_clear_sentence(call, words):
    with pytest.raises(ll.InputError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_value_bias_needs_a_value_map():
    with pytest.raises(InputError, match="value_bias was given without Wv"):
        ll.Head.from_projections(np.eye(2), np.eye(2), value_bias=[1.0, 0.0])
    head = ll.Head.from_projections(np.eye(2), np.eye(2), np.eye(2), value_bias=[1.0, 0.0])
    assert head.value_bias.tolist() == [1.0, 0.0]
