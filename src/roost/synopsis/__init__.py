"""Synopsis: a sketch of a stream of points that returns statistics with bounds.

`build` makes a synopsis from a table, `merge` adds synopses, `Synopsis.save` and `Synopsis.open`
store them. Queries take a synopsis and a `Scope` and return a `SynopsisResult`: a value, bounds,
and what the bounds promise. `docs/synopsis.md` describes both.
"""

from __future__ import annotations

from roost.synopsis.bands import Bands, Sketch
from roost.synopsis.bins import BinLearner, Bins, learn_bins
from roost.synopsis.bounds import BoundKind, SynopsisResult
from roost.synopsis.coarsening import Resolution, coarsen, split_at
from roost.synopsis.density import density, probability, quantiles, silverman
from roost.synopsis.forecast import forecast
from roost.synopsis.part import record_batches, select
from roost.synopsis.planes import fit_memory
from roost.synopsis.regression import Regression, regress
from roost.synopsis.scope import Scope
from roost.synopsis.set_queries import cardinality, contains, frequency
from roost.synopsis.spec import BinRule, Feature, SetSpec, SynopsisSpec
from roost.synopsis.statistics import (
    Outliers,
    contrast,
    correlation,
    count,
    mean,
    outliers,
    stddev,
)
from roost.synopsis.synopsis import Synopsis, build, merge
from roost.synopsis.synthesis import synthesize

__all__ = [
    "Bands",
    "BinLearner",
    "BinRule",
    "Bins",
    "BoundKind",
    "Feature",
    "Outliers",
    "Regression",
    "Resolution",
    "Scope",
    "SetSpec",
    "Sketch",
    "Synopsis",
    "SynopsisResult",
    "SynopsisSpec",
    "build",
    "cardinality",
    "coarsen",
    "contains",
    "contrast",
    "correlation",
    "count",
    "density",
    "fit_memory",
    "forecast",
    "frequency",
    "learn_bins",
    "mean",
    "merge",
    "outliers",
    "probability",
    "quantiles",
    "record_batches",
    "regress",
    "select",
    "silverman",
    "split_at",
    "stddev",
    "synthesize",
]
