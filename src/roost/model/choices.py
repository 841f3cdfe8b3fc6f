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


class Exchange(StrEnum):
    """When adaptive strategies send each point to the machine that owns its cell."""

    AUTO = "auto"  # where the queries do not fit into the memory of a host
    ALWAYS = "always"


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


class LayoutName(StrEnum):
    """Which operators of a dataflow share machines."""

    QUERY_CLOUD = "query_cloud"  # all: every machine runs every subquery
    OPERATOR_CLOUD = "operator_cloud"  # none: each operator has machines of its own
    OPERATOR_SET = "operator_set"  # those of a subquery
    AUTO = "auto"  # the cheapest, without exchanges that are not needed

    @property
    def divides(self) -> bool:
        """Whether machines are divided among operators or subqueries."""
        return self in (LayoutName.OPERATOR_CLOUD, LayoutName.OPERATOR_SET)


class ElasticPolicyName(StrEnum):
    """How an executor group is sized; ``docs/elastic.md`` describes each."""

    LOAD_AWARE = "load_aware"  # for the offered load, in one step
    INDIVIDUAL = "individual"  # one executor at a time
    SPARK = "spark"  # by waiting tasks, doubling
    ALGORITHM_2 = "algorithm_2"  # all groups together, by the load of the last round


class PlacementName(StrEnum):
    """Which executor group runs which operator; ``docs/elastic.md`` describes each."""

    OFF = "off"  # as the settings name them
    STATIC = "static"  # by decreasing load, once
    ALGORITHM_1 = "algorithm_1"  # moves between pairs of groups
    BEST = "best"  # the mapping with the lowest load of any group
