"""The rules by which torch's own ops shard: a class of ops a file, and the table that lists them (`table.py`)."""
