"""Space and grid: every finite point has exactly one cell, by the cells' own borders."""

from __future__ import annotations

import bisect
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from properties import examples
from roost.errors import ConfigError
from roost.kernel.cells import locate_cells
from roost.model.space import (
    EARTH_RADIUS_M,
    GRID_SIDE_MAX,
    Coordinates,
    Grid,
    Outside,
    Rect,
    Space,
    axis_edges,
    haversine_m,
    locate_axis,
)

finite = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def grids(draw) -> Grid:
    x0, y0 = draw(st.floats(-1e6, 1e6)), draw(st.floats(-1e6, 1e6))
    width, height = draw(st.floats(1e-3, 1e6)), draw(st.floats(1e-3, 1e6))
    bounds = Rect(x0, y0, x0 + width, y0 + height)
    return Grid(bounds, draw(st.integers(1, 40)), draw(st.integers(1, 40)))


def cell_by_borders(value: float, edges: list[float]) -> int:
    """Return the half-open cell of a value; the first and the last extend outwards."""
    for cell in range(len(edges) - 2):
        if value < edges[cell + 1]:
            return cell
    return len(edges) - 2


@given(grids(), st.data())
@examples(150)
def test_a_point_is_in_the_cell_whose_borders_hold_it(grid: Grid, data) -> None:
    on_x, on_y = st.sampled_from(grid.edges_x.tolist()), st.sampled_from(grid.edges_y.tolist())
    below = st.builds(lambda value: math.nextafter(value, -math.inf), on_x)
    x = data.draw(st.lists(on_x | below | finite, min_size=1, max_size=20))
    y = data.draw(st.lists(on_y | finite, min_size=len(x), max_size=len(x)))
    found = grid.locate(np.array(x), np.array(y)).tolist()
    edges_x, edges_y = grid.edges_x.tolist(), grid.edges_y.tolist()
    assert found == [
        cell_by_borders(b, edges_y) * grid.columns + cell_by_borders(a, edges_x)
        for a, b in zip(x, y, strict=True)
    ]


@given(grids())
@examples(100)
def test_compiled_cells_are_exact_on_and_next_to_every_border(grid: Grid) -> None:
    """A division is off by one cell there, because few bounds divide without rounding."""

    def next_to(edges: np.ndarray) -> np.ndarray:
        return np.concatenate([np.nextafter(edges, -np.inf), edges, np.nextafter(edges, np.inf)])

    x, y = (axis.ravel() for axis in np.meshgrid(next_to(grid.edges_x), next_to(grid.edges_y)))
    columns, rows = (
        [bisect.bisect_right(edges.tolist(), value) - 1 for value in values.tolist()]
        for edges, values in ((grid.edges_x, x), (grid.edges_y, y))
    )
    expected = np.clip(rows, 0, grid.rows - 1) * grid.columns + np.clip(
        columns, 0, grid.columns - 1
    )
    assert locate_cells(x, y, grid.edges_x, grid.edges_y).tolist() == expected.tolist()


@given(grids())
@examples(100)
def test_borders_ascend_from_bound_to_bound(grid: Grid) -> None:
    for edges, low, high, cells in (
        (grid.edges_x, grid.bounds.x0, grid.bounds.x1, grid.columns),
        (grid.edges_y, grid.bounds.y0, grid.bounds.y1, grid.rows),
    ):
        assert edges.size == cells + 1
        assert (edges[0], edges[-1]) == (low, high)
        assert (np.diff(edges) > 0).all()


def test_the_far_border_and_all_beyond_belong_to_the_last_cell() -> None:
    edges = axis_edges(0.0, 10.0, 5)
    values = np.array([-1e300, -0.0, 2.0, math.nextafter(2.0, 0.0), 10.0, 1e300])
    assert locate_axis(values, edges).tolist() == [0, 0, 1, 0, 4, 4]


def test_a_range_too_narrow_for_its_cells_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected a range wide enough for 1000 cells"):
        axis_edges(1.0, math.nextafter(1.0, 2.0), 1000)


@pytest.mark.parametrize(
    "corners",
    [
        pytest.param((1.0, 0.0, 0.0, 1.0), id="x inverted"),
        pytest.param((0.0, 1.0, 1.0, 0.0), id="y inverted"),
        pytest.param((0.0, 0.0, 0.0, 1.0), id="no width"),
        pytest.param((0.0, 0.0, 1.0, 0.0), id="no height"),
        pytest.param((math.nan, 0.0, 1.0, 1.0), id="NaN"),
        pytest.param((0.0, 0.0, math.inf, 1.0), id="infinite"),
    ],
)
def test_bounds_that_are_no_rectangle_are_refused(corners: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        Rect(*corners)
    assert caught.value.key == "space.bounds"
    assert caught.value.got == corners or any(math.isnan(value) for value in corners)


@pytest.mark.parametrize("sides", [(0, 5), (5, 0), (-1, 5), (GRID_SIDE_MAX + 1, 5)])
def test_grids_without_cells_or_with_too_many_are_refused(sides: tuple[int, int]) -> None:
    with pytest.raises(ConfigError) as caught:
        Grid(Rect(0.0, 0.0, 1.0, 1.0), *sides)
    assert caught.value.key == "space.grid"
    assert caught.value.got == f"{sides[0]}x{sides[1]}"


def test_a_space_equals_its_json_round_trip() -> None:
    space = Space(Rect(-1.5, 2.0, 3.0, 4.25), 7, 9, Coordinates.PLANE, Outside.DEAD)
    again = Space.from_json(space.to_json())
    assert again == space
    assert (again.grid.columns, again.grid.rows, again.grid.bounds) == (7, 9, space.bounds)


def test_a_space_has_a_thousand_by_a_thousand_cells_by_default() -> None:
    space = Space(Rect(0.0, 0.0, 1.0, 1.0))
    assert (space.columns, space.rows, space.grid.cells) == (1000, 1000, 1_000_000)


longitude, latitude = st.floats(-180, 180), st.floats(-90, 90)


def chord_distance_m(lon0: float, lat0: float, lon1: float, lat1: float) -> float:
    """Great-circle distance through the straight chord between unit vectors."""

    def vector(lon: float, lat: float) -> tuple[float, float, float]:
        phi, lam = math.radians(lat), math.radians(lon)
        return math.cos(phi) * math.cos(lam), math.cos(phi) * math.sin(lam), math.sin(phi)

    chord = math.dist(vector(lon0, lat0), vector(lon1, lat1))
    return 2 * EARTH_RADIUS_M * math.asin(min(1.0, chord / 2))


@given(longitude, latitude, longitude, latitude)
@examples(200)
def test_distance_is_the_great_circle_of_the_mean_sphere(lon0, lat0, lon1, lat1) -> None:
    expected = chord_distance_m(lon0, lat0, lon1, lat1)
    # Close to the antipode the sine loses half of its digits: a metre there.
    assert float(haversine_m(lon0, lat0, lon1, lat1)) == pytest.approx(expected, rel=1e-7, abs=1.0)


@pytest.mark.parametrize(
    ("lat0", "lat1"),
    [
        # Rounding lifts the haversine of these above one by two units in the last place.
        (57.31178807779581, -57.31178807758042),
        (57.31178807775617, -57.31178807762006),
        (57.31178807768785, -57.31178807768838),
        (57.31178807768632, -57.311788077689904),
        (57.31178807767403, -57.31178807770219),
        (0.0, 0.0),
        (90.0, -90.0),
    ],
)
@pytest.mark.parametrize("lon", [0.0, -180.0, 90.0])
def test_antipodes_are_half_the_circumference_apart(lon: float, lat0: float, lat1: float) -> None:
    half = math.pi * EARTH_RADIUS_M
    lon1 = lon - 180.0 if lon > 0.0 else lon + 180.0
    assert float(haversine_m(lon, lat0, lon1, lat1)) == pytest.approx(half, abs=1.0)
    assert float(haversine_m(lon1, lat1, lon, lat0)) == pytest.approx(half, abs=1.0)


def test_the_earth_has_the_documented_radius() -> None:
    assert EARTH_RADIUS_M == 6_371_008.8
    quarter = float(haversine_m(0.0, 0.0, 0.0, 90.0))
    assert quarter == pytest.approx(math.pi / 2 * 6_371_008.8)
