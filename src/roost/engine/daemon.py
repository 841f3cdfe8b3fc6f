"""The process that Spark forks Python workers from, with the kernel loaded beforehand.

A worker that starts with everything imported saves about a second, and the pages of the libraries
are shared between all workers of an executor.
"""

from __future__ import annotations

import gc

from pyspark import daemon

import roost.engine.worker  # noqa: F401  (loaded for the workers that are forked from here)

if __name__ == "__main__":
    # Workers collect garbage after every task; what is loaded by now stays, so leave it out.
    gc.collect()
    gc.freeze()
    daemon.manager()
