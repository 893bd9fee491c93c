"""Plans as files: data alone, and what they were made for."""
