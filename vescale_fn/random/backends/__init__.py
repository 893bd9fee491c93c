"""What computes the draws: torch ops, the C library, Triton."""
