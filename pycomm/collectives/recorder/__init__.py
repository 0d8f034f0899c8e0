"""Flight recorder: the last operations of this process on each group of ranks, with the calling line of the script.

The last operations of every communicator are kept, with when they began and ended. They are written to a file when an
operation fails because of another rank, and on SIGUSR2. ``pycomm explain`` reads the files of all ranks side by side.
"""

from pycomm.collectives.recorder.dump import DIRECTORY, FORMAT, dump, dump_on_signal, folder
from pycomm.collectives.recorder.ring import Recorder, from_here, labelled, listened_to, recorders

__all__ = [
    "DIRECTORY",
    "FORMAT",
    "Recorder",
    "dump",
    "dump_on_signal",
    "folder",
    "from_here",
    "labelled",
    "listened_to",
    "recorders",
]
