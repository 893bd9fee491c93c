"""The errors that vescale_fn raises."""

from ._core.base import front_door
from ._core.base.errors import (
    CheckpointError,
    CollectiveError,
    DataError,
    DivergenceError,
    DonationError,
    HardwareError,
    InPlaceError,
    MeshError,
    NoValueError,
    ParityError,
    RandomError,
    RankError,
    RecordError,
    ReshardError,
    ScheduleError,
    SpecError,
    TransformError,
    TreeError,
    VaryingTypeError,
    VfnError,
)
from ._core.base.errors import TypingError as TypingError

__all__ = [
    "CheckpointError",
    "CollectiveError",
    "DataError",
    "DivergenceError",
    "DonationError",
    "HardwareError",
    "InPlaceError",
    "MeshError",
    "NoValueError",
    "ParityError",
    "RandomError",
    "RankError",
    "RecordError",
    "ReshardError",
    "ScheduleError",
    "SpecError",
    "TransformError",
    "TreeError",
    "VaryingTypeError",
    "VfnError",
]

__dir__ = front_door.listing(__name__)
__getattr__ = front_door.hints(__name__)
