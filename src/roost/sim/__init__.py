"""Deterministic simulation of a cluster under load, faults and attacks.

Policies must be tested with more machines and more faults than a test host has: ``cluster.py``
simulates both, round by round, with load from ``workloads.py``; ``guarded.py`` adds users, some of
them malicious; in ``executors.py`` executors come and go. A seed determines every result. This
package does not use Spark and reads no clock.
"""
