"""One kind of work on a machine each: reading, matching, windows, statistics, joins.

:mod:`roost.stages.contract` defines what a stage is; the batch loop, the executors and the store
know nothing else about it.
"""
