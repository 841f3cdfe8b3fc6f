"""Durable state: query log, segments, index versions, plans, intents and commits. No Spark."""
