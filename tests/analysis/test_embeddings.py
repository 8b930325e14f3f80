"""Singular values, planes and neighbours of matrices whose answers are known."""

import math

import torch

from surface_fusion.analysis.embeddings import (
    log_singular_values,
    neighbours,
    principal_plane,
    same_words,
)


def test_singular_values_of_a_diagonal() -> None:
    matrix = torch.zeros(6, 3)
    matrix[0, 0], matrix[1, 1], matrix[2, 2] = 8.0, 2.0, 4.0
    expected = torch.tensor([0.0, math.log(0.5), math.log(0.25)])
    torch.testing.assert_close(log_singular_values(matrix), expected)


def test_a_matrix_of_lower_rank_has_finite_logs() -> None:
    assert log_singular_values(torch.ones(5, 4)).isfinite().all()


def test_principal_plane_keeps_the_distances_of_points_in_a_plane() -> None:
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(20, 2, generator=generator) @ torch.randn(2, 7, generator=generator) + 3
    places = principal_plane(flat)
    torch.testing.assert_close(torch.cdist(places, places), torch.cdist(flat, flat), rtol=1e-3, atol=1e-3)


def test_neighbours_are_ranked_by_cosine() -> None:
    source = torch.tensor([[1.0, 0.0], [0.0, 5.0]])
    target = torch.tensor([[0.1, 0.9], [3.0, 0.3], [-1.0, 0.0]])
    cosine, nearest = neighbours(source, target, 2)
    assert nearest.tolist() == [[1, 0], [0, 1]]
    assert cosine[0, 0].item() == torch.nn.functional.cosine_similarity(source[:1], target[1:2]).item()
    assert neighbours(source, target, 9)[1].shape == (2, 3)


def test_a_word_is_not_its_own_neighbour() -> None:
    """Nor is it one with another subword mark."""
    source, target = ["\u2581horse", "bird"], ["horse", "bird", "hor@@", "\u2581horse"]
    same = same_words(source, target)
    assert same.tolist() == [[True, False, False, True], [False, True, False, False]]
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    cosine, nearest = neighbours(
        rows, torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, 0.1]]), 2, same
    )
    assert nearest.tolist() == [[2, 1], [2, 3]]
    assert neighbours(rows[:1], torch.tensor([[1.0, 0.0]]), 2, torch.tensor([[True]]))[0].tolist() == [
        [-math.inf]
    ]
    assert cosine[0, 0].item() == torch.tensor(0.5).sqrt().item()
