"""What the command line, a service or a notebook can do, as functions that return values."""
