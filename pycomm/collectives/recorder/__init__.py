"""Flight recorder: the last operations of this process on each group of ranks, with the calling line of the script.

The last operations of every communicator are kept, with when they began and ended. They are written to a file when an
operation fails because of another rank, and on SIGUSR2. ``pycomm explain`` reads the files of all ranks side by side.
"""

from pycomm.collectives.recorder.ring import DIRECTORY as DIRECTORY
from pycomm.collectives.recorder.ring import TRACE_FOLDER as TRACE_FOLDER
from pycomm.collectives.recorder.ring import Recorder as Recorder
from pycomm.collectives.recorder.ring import from_here as from_here
from pycomm.collectives.recorder.ring import listened_to as listened_to
from pycomm.collectives.recorder.ring import recorders as recorders
from pycomm.collectives.recorder.ring import run_labelled as run_labelled
from pycomm.collectives.recorder.ring import told_with as told_with
