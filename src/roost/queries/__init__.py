"""Life cycle of queries: the request log, admission, log replay and the live set."""
