"""Made-up worlds: points that are drawn, not observed, and clusters that are numbers.

Benchmarks and tests need streams whose truth is known in advance (where the load is, when it moves)
and that any process can make without reading a file: ``generators.py`` has them. Policies need
more machines and more faults than there are at hand: ``cluster.py`` plays them, round by round,
with load from ``workloads.py`` and faults from ``faults.py``. Everything is the same every time for
the same seed. This package knows nothing of Spark, and reads no clock.
"""

from __future__ import annotations

from roost.sim.generators import Hotspot, Places, PointGenerator, load_places

__all__ = ["Hotspot", "Places", "PointGenerator", "load_places"]
