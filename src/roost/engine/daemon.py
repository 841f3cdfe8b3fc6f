"""The process that Spark forks Python workers from, with the code of tasks loaded beforehand.

numba takes four seconds to load the compiled loops of the kernel. A worker that is forked after
that starts with them, and all workers of an executor share the pages of the libraries. Workers
collect garbage after every task, which takes milliseconds for all that they imported themselves.
"""

from __future__ import annotations

import gc

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
