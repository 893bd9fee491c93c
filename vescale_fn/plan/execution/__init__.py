"""From a graph to a function that runs."""
