"""Choice of the planes: how many bins of each feature the leaves distinguish within a budget.

Nearly every row has a path of its own, so the planes decide what a leaf costs and, once rows begin
to share paths, how many leaves there are. `fit_memory` halves the resolution of one plane after
another until the predicted size fits: always the plane that takes the most bits, the one with the
highest fan-out. A HyperLogLog over path hashes predicts the number of leaves, so candidates need no
sorting and their sketches could be merged across machines. Records and marginals stay as they are.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numba import njit

from roost.errors import ConfigError
from roost.model.arrays import Floats
from roost.synopsis.bins import Bins
from roost.synopsis.leaves import CODES, Bytes, Paths, measure_runs
from roost.synopsis.paths import HASH_FACTOR, combine
from roost.synopsis.synopsis import Synopsis, assemble

REGISTER_BITS = 12
REGISTERS = 1 << REGISTER_BITS  # a standard error of 1.6 %


class Prediction(NamedTuple):
    """Predicted number of leaves, bytes of the packed leaves, and bits by feature."""

    leaves: float
    leaf_bytes: float
    bits: Floats


@njit(cache=True, nogil=True)
def _hash_paths(paths: Paths, planes: Bytes, registers: Bytes) -> None:  # pragma: no cover
    """Update the registers of a HyperLogLog with the paths after merging bins."""
    low_bits = np.uint64((1 << (64 - REGISTER_BITS)) - 1)
    for run in range(paths.run_keys.size):
        for k in range(paths.starts[run], paths.starts[run + 1]):
            value = np.uint64(paths.run_keys[run]) * HASH_FACTOR + np.uint64(paths.steps[k])
            for f in range(paths.codes.shape[1]):
                value = (value ^ (value >> np.uint64(29))) * HASH_FACTOR
                value += np.uint64(planes[f, paths.codes[k, f]])
            value = (value ^ (value >> np.uint64(32))) * HASH_FACTOR
            value = (value ^ (value >> np.uint64(29))) * HASH_FACTOR
            value ^= value >> np.uint64(32)
            register = np.int64(value >> np.uint64(64 - REGISTER_BITS))
            rest = value & low_bits
            rank = 1
            while rank <= 64 - REGISTER_BITS and not (
                rest >> np.uint64(64 - REGISTER_BITS - rank) & np.uint64(1)
            ):
                rank += 1
            registers[register] = max(registers[register], rank)


def estimate_distinct(registers: Bytes) -> float:
    """Return the number of distinct values of a HyperLogLog, with linear counting for few."""
    harmonic = float(np.sum(2.0 ** -registers.astype(np.float64)))
    estimate = 0.7213 / (1.0 + 1.079 / REGISTERS) * REGISTERS * REGISTERS / harmonic
    empty = int(np.count_nonzero(registers == 0))
    if estimate <= 2.5 * REGISTERS and empty:
        return REGISTERS * math.log(REGISTERS / empty)
    return estimate


def predict(paths: Paths, bins: Bins) -> Prediction:
    """Predict the leaves of paths under other planes; paths have one row of codes per bin."""
    registers = np.zeros(REGISTERS, np.uint8)
    _hash_paths(paths, bins.planes, registers)
    leaves = min(estimate_distinct(registers), float(paths.steps.size))
    merged = paths._replace(codes=_merge_codes(paths.codes, bins.planes))
    runs, features = paths.run_keys.size, paths.codes.shape[1]
    widths = np.empty((runs, CODES + features), np.uint8)
    measure_runs(merged, np.empty((runs, features), np.uint8), widths)
    sizes, bits = np.diff(paths.starts), (widths & 127).astype(np.float64)
    share = leaves / max(paths.steps.size, 1)
    words = np.ceil(sizes * bits.sum(axis=1) * share / 64.0)  # each run begins with a new word
    return Prediction(leaves, 8.0 * float(words.sum()), sizes @ bits[:, CODES:])


def _merge_codes(codes: Bytes, planes: Bytes) -> Bytes:
    return np.stack([planes[f][codes[:, f]] for f in range(codes.shape[1])], axis=1)


def fit_memory(synopsis: Synopsis, memory: int) -> Synopsis:
    """Return the synopsis with the planes at the highest resolution that fits ``memory`` bytes.

    Raises `ConfigError` if records and marginals alone take more.
    """
    fixed = synopsis.nbytes - synopsis.leaves.words.nbytes
    bins, paths = synopsis.bins, synopsis.paths()
    if any(bins.halvings):
        raise ConfigError("synopsis", "planes that were merged before", "planes with all bins")
    while True:
        prediction = predict(paths, bins)
        if fixed + prediction.leaf_bytes <= memory:
            fitted = merge_planes(synopsis, paths, bins)
            if fitted.nbytes <= memory:
                return fitted
        halvable = np.array(bins.plane_counts) > 1
        if not halvable.any():
            least = math.ceil(fixed + prediction.leaf_bytes)
            raise ConfigError("synopsis.memory", memory, f"at least {least} bytes for this table")
        bins = bins.halved(int(np.argmax(np.where(halvable, prediction.bits, -1.0))))


def merge_planes(synopsis: Synopsis, paths: Paths, bins: Bins) -> Synopsis:
    """Return the synopsis with leaves of other planes; ``paths`` are its own."""
    if bins.halvings == synopsis.bins.halvings:
        return synopsis
    codes = _merge_codes(paths.codes, bins.planes)
    copies = Paths._make(column.copy() for column in paths)
    merged = combine(copies._replace(codes=codes))
    rest = (synopsis.places, synopsis.bin_records, synopsis.rows, synopsis.totals)
    fitted = assemble(synopsis.spec, bins, synopsis.groups, merged, *rest)
    return replace(fitted, sets=synopsis.sets)
