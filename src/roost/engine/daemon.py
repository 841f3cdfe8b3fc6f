"""The process that Spark forks Python workers from, with the kernel loaded beforehand.

numba takes four seconds to load the compiled loops of the kernel. A worker that is forked after
that starts with them, and all workers of an executor share the pages of the libraries.
"""

from __future__ import annotations

import gc

from pyspark import daemon

import roost.engine.worker  # noqa: F401  (loaded for the workers that are forked from here)
from roost.kernel.compilation import compile_loops

if __name__ == "__main__":
    compile_loops()
    # Workers collect garbage after every task; what is loaded by now stays, so leave it out.
    gc.collect()
    gc.freeze()
    daemon.manager()
