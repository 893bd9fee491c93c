"""Runnable training programs on real input, written with the public names alone."""
