"""Several runs, one table."""
