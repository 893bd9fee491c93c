"""Data in batches that are a function of the step: the same rows for any number of processes, and from any step on."""

from .._core.base import front_door
from .batches import Batches, batches
from .feistel import index_shuffle

__all__ = ["Batches", "batches", "index_shuffle"]

__dir__ = front_door.listing(__name__)
__getattr__ = front_door.hints(__name__)
