"""The rules by which an executor group is sized, checked when they are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from roost.errors import ConfigError
from roost.model.choices import ElasticPolicyName

DEFAULT_GROUP = "default"
"""The executor group of sources, and of all that no group is named for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticRules:
    """Limits and thresholds; utilisation is a share of all slots of the group.

    Parameters
    ----------
    min, max
        Limits of the layout; layout and spares together never exceed ``max``.
    lower, upper, target
        Utilisation below and above which the group is sized, and for which it is sized.
    imbalance, improvement
        Standard deviation of utilisation above which the load is balanced, and the least relative
        reduction that a change must achieve.
    batch_seconds
        Duration that a batch should have, for sources without a pace.
    spares
        Warm executors outside the layout.
    by_started_hour
        Whether every hour that an executor has begun costs as much as a whole one: then executors
        near the end of theirs are released first.
    forecast
        Whether the load after the provisioning time is predicted.
    policy
        How sizes are chosen.
    arrival_s
        How long to wait for a requested executor at least.
    """

    min: int = 1
    max: int
    lower: float = 0.5
    upper: float = 0.9
    target: float = 0.6
    imbalance: float = 0.10
    improvement: float = 0.05
    batch_seconds: float | None = None
    spares: int = 0
    by_started_hour: bool = False
    forecast: bool = True
    policy: ElasticPolicyName = ElasticPolicyName.LOAD_AWARE
    arrival_s: float = 60.0

    def __post_init__(self) -> None:
        """Check values that contradict each other."""
        checks = (
            ("min", self.min >= 1, "a whole number from 1 up"),
            ("max", self.max >= 1, "a whole number from 1 up"),
            ("min", self.min <= self.max, f"at most elastic.max, which is {self.max}"),
            ("spares", self.spares >= 0, "a whole number from 0 up"),
            ("lower", self.lower > 0.0, "a number above 0"),
            ("lower", self.lower < self.target, f"below elastic.target, which is {self.target:g}"),
            ("target", self.target < self.upper, f"below elastic.upper, which is {self.upper:g}"),
            ("batch_seconds", self.batch_seconds is None or self.batch_seconds > 0, "above 0"),
        )
        for name, valid, expected in checks:
            if not valid:
                raise ConfigError(f"elastic.{name}", getattr(self, name), expected)
        try:
            object.__setattr__(self, "policy", ElasticPolicyName(self.policy))
        except ValueError:
            names = " or ".join(ElasticPolicyName)
            raise ConfigError("elastic.policy", self.policy, names) from None

    def spares_beside(self, executors: int) -> int:
        """Return how many spares a layout of this size leaves room for."""
        return max(min(self.spares, self.max - executors), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRules:
    """An executor group.

    Parameters
    ----------
    name
        Of the group; of the default one, whose limits and cores are those of the run, only the
        operators are given.
    min, max
        Limits of its executors; ``max`` is ``min`` by default.
    cores, memory
        Of each executor, as in Spark's settings.
    operators
        Operators of the dataflow that run in it at first.
    """

    name: str
    min: int = 1
    max: int = 0
    cores: int = 1
    memory: str = "1g"
    operators: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check values."""
        object.__setattr__(self, "max", self.max or self.min)
        object.__setattr__(self, "operators", tuple(self.operators))
        for key, valid, expected in (
            ("name", self.name != "", "a name"),
            ("min", self.min >= 1, "a whole number from 1 up"),
            ("max", self.max >= self.min, f"at least min, which is {self.min}"),
            ("cores", self.cores >= 1, "a whole number from 1 up"),
        ):
            if not valid:
                raise ConfigError(f"elastic.groups.{key}", getattr(self, key), expected)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Return the group of a table of settings."""
        kinds = {item.name: str(item.type) for item in fields(cls)}
        for key, value in given.items():
            if key not in kinds:
                raise ConfigError(f"elastic.groups.{key}", value, f"one of {', '.join(kinds)}")
            if given.get("name") == DEFAULT_GROUP and key not in ("name", "operators"):
                expected = f"nothing for {DEFAULT_GROUP}, whose settings are those of the run"
                raise ConfigError(f"elastic.groups.{key}", value, expected)
            whole = isinstance(value, int) and not isinstance(value, bool)
            texts = isinstance(value, list | tuple) and all(isinstance(v, str) for v in value)
            valid = {"int": whole, "str": isinstance(value, str)}.get(kinds[key], texts)
            if not valid:
                noun = {"int": "a whole number", "str": "text"}.get(kinds[key], "a list of texts")
                raise ConfigError(f"elastic.groups.{key}", value, noun)
        if "name" not in given:
            raise ConfigError("elastic.groups.name", None, "a name for each group")
        return cls(**given)
