"""Looking at a program: layouts, communication, a profile, and `check_parity` against one device."""

from .._core.base import front_door
from .debug_mode import debug
from .needless_moves import needless
from .parity import Report, check_parity
from .parity import check as check
from .profile import profile
from .show import show
from .typeof import typeof

__all__ = ["Report", "check_parity", "debug", "needless", "profile", "show", "typeof"]

__dir__ = front_door.listing(__name__)
__getattr__ = front_door.hints(__name__)
