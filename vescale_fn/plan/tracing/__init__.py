"""From a function to a graph, and when it must be traced again."""
