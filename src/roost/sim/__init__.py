"""Made-up worlds: points that are drawn, not observed, the same ones every time.

Benchmarks and tests need streams whose truth is known in advance (where the load is, when it moves)
and that any process can make without reading a file. This package has the seeded generators for
that. It knows nothing of Spark, and reads no clock.
"""

from __future__ import annotations

from roost.sim.generators import Hotspot, Places, PointGenerator, load_places

__all__ = ["Hotspot", "Places", "PointGenerator", "load_places"]
