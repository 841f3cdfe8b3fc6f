"""Durable state: facts, files, logs and locks. Knows no domain type; the only package with SQL."""
