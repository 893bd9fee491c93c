"""Mixed precision: policies of dtypes, wide copies of narrow parameters, scaled losses, a guard against what is not finite."""

from .finite import all_finite, nan_guard
from .loss_scale import ScaledState, scaled
from .master import MasterState, master
from .policy import Policy, policy

__all__ = ["MasterState", "Policy", "ScaledState", "all_finite", "master", "nan_guard", "policy", "scaled"]
