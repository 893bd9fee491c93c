"""What devices and links do in a second, as data: presets, JSON, a measurement of a mesh that is there."""

from .._core.base import front_door
from .hardware import Hardware
from .links import Link, Protocol
from .measurement import measure
from .presets import a100, b200, cpu, h100

__all__ = ["Hardware", "Link", "Protocol", "a100", "b200", "cpu", "h100", "measure"]

__dir__ = front_door.listing(__name__)
__getattr__ = front_door.hints(__name__)
