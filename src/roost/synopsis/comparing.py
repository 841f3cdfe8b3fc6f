"""Comparisons of two features, of which only ranges are known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.errors import PredicateError
from roost.kernel.shapes import BORDER, INSIDE, OUTSIDE
from roost.model.arrays import Floats
from roost.predicate.ast import Comparison, Kind
from roost.predicate.kinds import kind_of

NEGATED = {"=": "!=", "!=": "=", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}
MIRRORED = {">": "<", ">=": "<="}
Ranges = tuple[Floats, Floats]  # least and greatest values


def features_compared(comparison: Comparison, schema: pa.Schema) -> tuple[str, str]:
    """Return the features that a comparison is of; raises `PredicateError` if it is of more."""
    operands = comparison.operands
    names = ", ".join(sorted(comparison.attributes()))
    if comparison.operator not in NEGATED or not all(isinstance(name, str) for name in operands):
        problem = "a synopsis compares a feature with constants or another feature, no arithmetic"
        raise PredicateError(f"condition on {names}: {problem}")
    first, second = operands
    if any(kind_of(schema.field(name).type) is not Kind.NUMBER for name in operands):
        raise PredicateError(f"condition on {names}: a synopsis compares features that are numbers")
    return first, second


def judge_ranges(
    operator: str, negated: bool, first: Ranges, second: Ranges
) -> tuple[NDArray[Any], Floats]:
    """Return state and estimated share of values in two ranges, neither of them null.

    Shares take both values as uniform and independent near their middle.
    """
    operator = NEGATED[operator] if negated else operator
    if operator in MIRRORED:
        operator, first, second = MIRRORED[operator], second, first
    (low_a, high_a), (low_b, high_b) = first, second
    with np.errstate(invalid="ignore", divide="ignore"):
        below = (high_b - low_a) / ((high_a - low_a) + (high_b - low_b))
    if operator in ("=", "!="):
        inside = (low_a == high_a) & (low_b == high_b) & (low_a == low_b)
        touched = (low_a <= high_b) & (low_b <= high_a)
        below = np.zeros(inside.shape)
    elif operator == "<":
        inside, touched = high_a < low_b, low_a < high_b
    else:
        inside, touched = high_a <= low_b, low_a <= high_b
    states = np.where(inside, INSIDE, np.where(touched, BORDER, OUTSIDE))
    shares = np.clip(np.nan_to_num(below, nan=0.5), 0.0, 1.0)
    if operator == "!=":
        states, shares = INSIDE - states, 1.0 - shares
    return states, np.where(states == BORDER, shares, states / INSIDE)
