"""The process that Spark forks Python workers from, with the code of tasks loaded beforehand.

numba takes four seconds to load the compiled loops of the kernel. A worker that is forked after
that starts with them, and all workers of an executor share the pages of the libraries. Workers
collect garbage after every task, which takes milliseconds for all that they imported themselves.

Spark puts its Python packages on the path as archives, which have no byte code: half a second of
each start would be spent on compiling them. An installed PySpark has the same modules as files.
"""

# ruff: noqa: E402
from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from pathlib import Path


def without_archives(path: Sequence[str]) -> list[str]:
    """Return a module search path without the archives of a PySpark that is on it as files."""
    files = {(Path(entry) / "pyspark" / "python" / "lib").resolve() for entry in path}
    archives = {one for one in path if one.endswith(".zip") and Path(one).resolve().parent in files}
    return [one for one in path if one not in archives]


sys.path[:] = without_archives(sys.path)

import pyspark.worker  # noqa: F401  (loaded for the workers that are forked from here)
from pyspark import daemon

import roost.engine.worker
import roost.stages.flow_early
import roost.stages.flow_source
import roost.stages.flow_stateless
import roost.stages.flow_subquery
import roost.stages.matching
import roost.stages.statistics
import roost.stages.window  # noqa: F401
from roost.kernel.compilation import compile_loops

if __name__ == "__main__":
    compile_loops()
    # What is loaded by now stays, so the collector need not visit it.
    gc.collect()
    gc.freeze()
    daemon.manager()
