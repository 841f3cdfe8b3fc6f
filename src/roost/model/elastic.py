"""The rules by which an executor group is sized, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass

from roost.errors import ConfigError
from roost.model.choices import ElasticPolicyName


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
