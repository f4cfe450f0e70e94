from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from alltokens.core import geometry

CORNERS = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])


def _random_matrix(*shape: int, seed: int = 0) -> torch.Tensor:
    noise = torch.rand(*shape, 2, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.eye(2, 3, dtype=torch.float64) + 0.4 * (noise - 0.5)


def test_identity_moves_nothing():
    assert torch.equal(geometry.apply(geometry.identity(), CORNERS), CORNERS)


def test_a_crop_and_its_mirror_image_are_the_matrices_of_the_contract():
    left, top, width, height = 0.25, 0.125, 0.5, 0.75
    crop = geometry.crop(left, top, width, height)
    assert crop.tolist() == [[width, 0, left], [0, height, top]]
    mirrored = geometry.compose(crop, geometry.flip(horizontal=True))
    assert mirrored.tolist() == [[-width, 0, left + width], [0, height, top]]
    upside_down = geometry.compose(crop, geometry.flip(vertical=True))
    assert upside_down.tolist() == [[width, 0, left], [0, -height, top + height]]


def test_flips_may_differ_within_a_batch():
    flips = geometry.flip(torch.tensor([True, False]), torch.tensor([False, True]))
    assert flips.tolist() == [[[-1, 0, 1], [0, 1, 0]], [[1, 0, 0], [0, -1, 1]]]


@pytest.mark.parametrize("size", [(224, 224), (100, 300), (64, 16)])
@pytest.mark.parametrize("degrees", [30.0, -75.0, 180.0])
def test_turning_keeps_all_lengths_in_pixels_and_the_centre(degrees, size):
    pixels = torch.tensor([size[1], size[0]], dtype=torch.float32)
    points = torch.rand(20, 2, generator=torch.Generator().manual_seed(1))
    turned = geometry.apply(geometry.rotate(degrees, size), points)
    torch.testing.assert_close(
        torch.cdist(turned * pixels, turned * pixels), torch.cdist(points * pixels, points * pixels)
    )
    centre = torch.tensor([[0.5, 0.5]])
    torch.testing.assert_close(geometry.apply(geometry.rotate(degrees, size), centre), centre)


def test_a_quarter_turn_is_counter_clockwise():
    # What is shown at the left edge was at the top: the top of the picture has turned to the left.
    source = geometry.apply(geometry.rotate(90.0), torch.tensor([[0.0, 0.5]]))
    torch.testing.assert_close(source, torch.tensor([[0.5, 0.0]]))


def test_shearing_moves_by_pixels_for_each_pixel_from_the_centre():
    size = (100, 300)  # 50 pixels below the centre; 0.2 * 50 = 10 pixels to the side, of 300
    source = geometry.apply(geometry.shear(0.2, 0.0, size), torch.tensor([[0.5, 1.0]]))
    torch.testing.assert_close(source, torch.tensor([[0.5 + 10 / 300, 1.0]]))
    source = geometry.apply(geometry.shear(0.0, 0.2, size), torch.tensor([[1.0, 0.5]]))  # 0.2 * 150 pixels down, of 100
    torch.testing.assert_close(source, torch.tensor([[1.0, 0.5 + 30 / 100]]))
    corner = geometry.shear(0.2, 0.0, size, centre=(0.0, 0.0))
    torch.testing.assert_close(geometry.apply(corner, torch.zeros(1, 2)), torch.zeros(1, 2))


def test_a_shift_shows_what_lies_to_the_right_and_below():
    source = geometry.apply(geometry.translate(0.25, -0.5), torch.tensor([[0.5, 0.5]]))
    assert source.tolist() == [[0.75, 0.0]]


def test_numbers_and_tensors_give_the_same_matrices():
    amount = torch.tensor([0.3, -0.2])
    for make in (lambda v: geometry.rotate(v, (3, 4)), lambda v: geometry.shear(v, 0.1, (3, 4)), geometry.translate):
        torch.testing.assert_close(make(amount), torch.stack([make(float(value)) for value in amount]))


def test_composing_is_applying_the_last_one_first():
    matrices = [_random_matrix(3, seed=seed) for seed in range(3)]
    points = torch.rand(3, 5, 2, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    expected = points
    for matrix in reversed(matrices):
        expected = geometry.apply(matrix, expected)
    torch.testing.assert_close(geometry.apply(geometry.compose(*matrices), points), expected)


def test_the_inverse_leads_back():
    matrix = _random_matrix(4)
    both = geometry.compose(matrix, geometry.invert(matrix))
    torch.testing.assert_close(both, torch.eye(2, 3, dtype=torch.float64).expand(4, 2, 3))


def test_coordinates_are_the_matrix_applied_to_pixel_centres():
    matrix, size = _random_matrix(2), (3, 5)
    x, y = geometry.coordinates(matrix, size)
    centres = [[(column + 0.5) / 5, (row + 0.5) / 3] for row in range(3) for column in range(5)]
    expected = geometry.apply(matrix, torch.tensor(centres, dtype=torch.float64)).view(2, 3, 5, 2)
    torch.testing.assert_close(torch.stack((x, y), dim=-1), expected)
    torch.testing.assert_close(geometry.grid_for(matrix, size), 2 * expected - 1)


def test_the_identity_s_grid_samples_the_picture_itself():
    picture = torch.rand(1, 3, 7, 5, generator=torch.Generator().manual_seed(2))
    grid = geometry.grid_for(geometry.identity()[None], (7, 5))
    torch.testing.assert_close(F.grid_sample(picture, grid, align_corners=False), picture)


def test_a_mirrored_half_samples_exactly_its_pixels():
    picture = torch.arange(8.0).view(1, 1, 1, 8)
    right_half = geometry.compose(geometry.crop(0.5, 0.0, 0.5, 1.0), geometry.flip(horizontal=True))
    sampled = F.grid_sample(picture, geometry.grid_for(right_half[None], (1, 4)), align_corners=False)
    torch.testing.assert_close(sampled.flatten(), torch.tensor([7.0, 6.0, 5.0, 4.0]))


def test_no_input_is_changed():
    matrix, points = _random_matrix(2), CORNERS.double().expand(2, 4, 2)
    before = matrix.clone()
    geometry.compose(matrix, matrix), geometry.invert(matrix), geometry.apply(matrix, points)
    geometry.grid_for(matrix, (2, 2))
    assert torch.equal(matrix, before)
    assert math.isclose(float(points.sum()), 8.0)


def test_everything_compiles_whole():
    def chain(angle: torch.Tensor) -> torch.Tensor:
        turned = geometry.compose(geometry.crop(0.1, 0.2, 0.5, 0.5), geometry.rotate(angle, (4, 6)))
        return geometry.grid_for(geometry.invert(turned), (4, 6))

    angle = torch.tensor([10.0, 40.0])
    compiled = torch.compile(chain, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(angle), chain(angle))
