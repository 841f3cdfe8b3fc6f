"""Queries: the request log, admission, log replay and the live set."""
