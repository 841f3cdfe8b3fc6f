"""Loads of the papers, by name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from roost.sim.load_curves import Curve
from roost.sim.workloads import CellHotspot, LoadSpec


def hotspot_loads(
    rounds: int = 80, load: LoadSpec | None = None, queries: int = 1_000
) -> dict[str, LoadSpec]:
    """Return the papers' loads by name: five hotspots, a steady load and an oscillating one.

    Hotspots are active in the middle half of the rounds. They are figures 6.6 to 6.10 of the
    dissertation: ``rise``, ``rise-normal``, ``step``, ``two-at-once`` and ``two-in-turn``.
    """
    usual = load or LoadSpec()
    start, stop = rounds // 4, 3 * rounds // 4
    middle = (start + stop) // 2
    low, high = (0.15, 0.15), (0.85, 0.85)

    def step(center: tuple[float, float], first: int, last: int, part: float) -> CellHotspot:
        return CellHotspot(center, first, last, 0.4 * part, queries=int(queries * part))

    def rise(center: tuple[float, float], first: int, last: int, part: float) -> CellHotspot:
        return replace(step(center, first, last, part), intensity="normal")

    spots: dict[str, tuple[CellHotspot, ...]] = {
        "steady": (),
        "rise": (rise(low, start, stop, 1.0),),
        "rise-normal": (replace(rise(low, start, stop, 1.0), spread="normal"),),
        "step": (step(low, start, stop, 1.0),),
        "two-at-once": (rise(low, start, stop, 0.5), rise(high, start, stop, 0.5)),
        "two-in-turn": (rise(low, start, middle, 0.5), rise(high, middle, stop, 0.5)),
    }
    loads = {name: replace(usual, hotspots=value) for name, value in spots.items()}
    return loads | {"swing": replace(usual, swing=0.3)}


def spike(usual: float, high: float, at: float, length_s: float) -> Curve:
    """Have another load for a while."""
    return lambda clock: np.where((clock >= at) & (clock < at + length_s), high, usual)
