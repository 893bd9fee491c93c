"""Types of local values: varying, invariant, unreduced, reduced."""
