"""Checkpoints: save, load, export, and the last few of a training run. Any mesh to any mesh."""

from .._core.base import front_door
from .async_save import Saving
from .digest import digest
from .elastic import elastic
from .export import export as export
from .export import export_weights
from .load import load
from .manager import Manager
from .save import save
from .state_dict import from_state_dict, state_dict

__all__ = ["Manager", "Saving", "digest", "elastic", "export_weights", "from_state_dict", "load", "save", "state_dict"]

__dir__ = front_door.listing(__name__)
__getattr__ = front_door.hints(__name__)
