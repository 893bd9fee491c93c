"""The graph of a plan and its analyses."""
