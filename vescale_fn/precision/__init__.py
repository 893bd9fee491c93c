"""Mixed precision: policies of dtypes, scaled losses, and a guard against numbers that are not finite."""

from .finite import all_finite, nan_guard
from .loss_scale import ScaledState, scaled
from .policy import Policy, policy

__all__ = ["Policy", "ScaledState", "all_finite", "nan_guard", "policy", "scaled"]
