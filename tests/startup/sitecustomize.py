"""What every interpreter begins with that tests start: it looks for garbage seldom, and not where it ends, a third of its time."""

import atexit
import gc

gc.set_threshold(200_000, 20, 20)
atexit.register(gc.freeze)
