"""Mixed precision: policies of dtypes, wide copies of narrow parameters, scaled losses, a guard against what is not finite."""

from .._core.base import front_door
from .finite import all_finite, nan_guard
from .loss_scale import ScaledState, loss_scaled
from .loss_scale import scaled as scaled
from .master import MasterState, master_weights
from .master import master as master
from .policy import Policy, policy

__all__ = ["MasterState", "Policy", "ScaledState", "all_finite", "loss_scaled", "master_weights", "nan_guard", "policy"]

__dir__ = front_door.listing(__name__)
__getattr__ = front_door.hints(__name__)
