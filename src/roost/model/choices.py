"""Named choices of settings that the engine and the policies share."""

from __future__ import annotations

from enum import StrEnum


class Strategy(StrEnum):
    """How a plan places work on machines; ``docs/balance.md`` describes each."""

    REPLICATED = "replicated"
    UNIFORM = "uniform"
    HISTORY = "history"
    SWARM = "swarm"
    GLOBAL = "global"

    @property
    def adaptive(self) -> bool:
        """Whether the plan changes while the stream runs."""
        return self in (Strategy.SWARM, Strategy.GLOBAL)


class WindowKind(StrEnum):
    """Unit of a window's length."""

    TIME = "time"  # units of event time
    COUNT = "count"  # points
    BYTES = "bytes"  # of stored window data, in whole batches


class BucketPolicy(StrEnum):
    """How the buckets of a dataflow are balanced; ``docs/dataflow.md`` describes each."""

    PLANNER = "planner"
    GREEDY = "greedy"
    OFF = "off"
