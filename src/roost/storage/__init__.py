"""Durable state: facts, files, logs and locks. No domain types; the only package with SQL."""
