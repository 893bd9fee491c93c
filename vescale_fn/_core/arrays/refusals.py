"""Why an op on arrays is refused: the whole list. Every other op gives what one device gives.

The sweep over torch's own database of ops (`tests/sweep.py`) is held to it. Beside these stand what one device refuses too,
and moves under `vfn.strict()`. What is not strided (sparse, quantised, nested) is no array: it passes as a plain tensor.
"""

from ..base.stateful_draws import DRAW

# Changes of what an array is, where blocks on many ranks stand for one memory.
STORAGE = "an array's shape and storage cannot be changed in place"
MOVE = "the elements would have to move"
MEMORY = "a view of an array does not show the memory around it"

# Writes that would be seen through another name on one device, and here would be lost: the elements had to be moved.
LOST = "a write into a view, or a resharded value, whose elements had to be moved would be lost"
MISSED = "this value was copied out of an array that was changed in place afterwards"
OVERLAP = "two of the values to write are views of one memory"
ONE = "more than one of the elements to write are one in memory"
READS = "it reads some of the elements that it writes, through another view of them"
OTHER_SHAPE = "the array to write into has another shape than what is to be written"

REASONS = (DRAW, STORAGE, MOVE, MEMORY, LOST, MISSED, OVERLAP, ONE, READS, OTHER_SHAPE)
