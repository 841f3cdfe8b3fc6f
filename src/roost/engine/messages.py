"""What the driver tells its tasks, and what they tell it: plain values that are pickled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from roost.balance import Plan
from roost.engine.decode import PointSchema
from roost.space import Space
from roost.state.store import SegmentRef
from roost.state.windows import WindowFile
from roost.window import Alias
from roost.workload import CellCounts


@dataclass(frozen=True)
class TrioTask:
    """How the machines of a batch keep TrioStat's statistics, which never leave them.

    Parameters
    ----------
    folder
        Where they keep them; a file is named by the batch and attempt that wrote it.
    files
        By machine, the file of the batch before.
    before
        The plan of the batch before, which tells whose file has a partition that was moved here.
    close
        Whether the round ended with the batch before.
    fade
        What is left of earlier rounds' points when a round is closed.
    gone
        Files of the window whose points have left it since the batch before.
    now
        Event time that the stream had reached by then; queries that ended before are not counted.
    """

    folder: str
    files: Mapping[int, str]
    before: Plan
    close: bool
    now: int
    fade: float
    gone: tuple[str, ...] = ()


@dataclass(frozen=True)
class WindowTask:
    """Where the machines of a batch leave its points, with which attributes and other names."""

    folder: str
    attributes: tuple[str, ...]
    aliases: Mapping[str, Alias]
    oldest: int  # batch before which nobody asks for points any more


@dataclass(frozen=True)
class BatchTask:
    """All that a worker must know of a batch.

    ``arrivals`` names the partitions that a machine has just been given, and ``arriving`` tells how
    many queries are in them, where that is known; ``count_cells`` and ``trio`` say what to note
    for the balancer.
    """

    batch_id: int
    space: Space
    plan: Plan
    segment_folder: str
    segments: tuple[SegmentRef, ...]
    points: PointSchema
    wanted: tuple[str, ...]
    query_id_type: pa.DataType
    match_folder: str | None  # None counts matches and writes none
    dead_folder: str
    window: WindowTask | None = None  # None keeps no window
    late_before: int | None = None  # event time; older points are too late
    arrivals: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    arriving: Mapping[int, int] = field(default_factory=dict)
    count_cells: bool = False
    trio: TrioTask | None = None


@dataclass
class MachineResult:
    """What one machine did in a batch.

    ``busy_s`` is processor time, of which ``load_s`` went into loading queries of partitions that
    it was given. ``numerator`` and ``received`` are the two numbers of the SWARM protocol.
    """

    machine: int
    points: int = 0
    checks: int = 0
    matches: int = 0
    busy_s: float = 0.0
    rows: int = 0
    dead: int = 0
    route_s: float = 0.0
    time_min: int | None = None
    time_max: int | None = None
    loaded_queries: int = 0
    loaded_bytes: int = 0
    load_s: float = 0.0
    numerator: float = 0.0
    received: float = 0.0
    match_files: list[str] = field(default_factory=list)
    dead_files: list[str] = field(default_factory=list)
    trio_files: list[str] = field(default_factory=list)
    window: WindowFile | None = None
    cells: CellCounts | None = None
