"""Baselines of the benchmarks that run on Spark."""
