"""Division and concatenation of the eight lines of an axis when a partition changes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from roost.workload.loops import N_NEW, PRE_SPAN, Q_NEW, SPAN, SPAN_NEW, N, Q, R

Numbers = NDArray[np.float64]


def starts_of(cumulative: Numbers) -> Numbers:
    """Invert a cumulative sum."""
    return np.diff(cumulative, prepend=0.0)


def cut_along(whole: Numbers, first: Numbers, second: Numbers) -> None:
    """Divide the axis that is cut, exactly.

    Queries that span the cut start at the cut in the second part.
    """
    at = first.shape[1]
    first[:] = whole[:, :at]
    second[:] = whole[:, at:]
    second[N] -= whole[N, at - 1]
    second[Q] += whole[SPAN, at] - whole[Q, at - 1]
    second[R] += whole[PRE_SPAN, at] - whole[R, at - 1]
    second[Q_NEW, 0] += whole[SPAN_NEW, at]
    for line in (SPAN, PRE_SPAN, SPAN_NEW):
        second[line, 0] = 0.0


def cut_across(whole: Numbers, along: Numbers, across: Numbers) -> None:
    """Assign a part its share of the other axis, by the part's totals along the cut axis."""
    for line, span in ((N, None), (Q, SPAN), (R, PRE_SPAN)):
        share = _share(starts_of(whole[line]), float(along[line, -1]), across[line])
        np.cumsum(across[line], out=across[line])
        if span is not None:
            across[span] = whole[span] * share
    for line, span in ((N_NEW, None), (Q_NEW, SPAN_NEW)):
        share = _share(whole[line], float(along[line].sum()), across[line])
        if span is not None:
            across[span] = whole[span] * share


def _share(values: Numbers, total: float, out: Numbers) -> float:
    """Scale values to a total; distribute it evenly if they give no proportion."""
    everything = float(values.sum())
    share = total / everything if everything else -1.0
    if not 0.0 <= share <= 1.0:
        # Registrations and terminations cancel out, so the sum gives no proportion.
        out[:] = total / values.size
        return 0.0
    out[:] = values * share
    return share


def join_along(first: Numbers, second: Numbers, whole: Numbers) -> None:
    """Concatenate two axes."""
    at = first.shape[1]
    whole[:, :at] = first
    whole[:, at:] = second
    for line in (N, Q, R):
        whole[line, at:] += first[line, -1]
