"""Keyed dataflows: operators over streams of tuples, whose state is divided into buckets."""
