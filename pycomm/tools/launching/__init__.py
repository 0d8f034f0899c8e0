"""Ranks on this host: start processes, join them in a group, call functions on all of them, leave none behind."""

from pycomm.tools.launching.launcher import launch as launch
from pycomm.tools.launching.launcher import run_ranks as run_ranks
from pycomm.tools.launching.pool import PerRank as PerRank
from pycomm.tools.launching.pool import RankOutcome as RankOutcome
from pycomm.tools.launching.pool import RankPool as RankPool
from pycomm.tools.launching.pool import StartedRanks as StartedRanks
from pycomm.tools.launching.processes import PATIENCE as PATIENCE
from pycomm.tools.launching.processes import Outputs as Outputs
from pycomm.tools.launching.processes import Pipe as Pipe
from pycomm.tools.launching.processes import RankProcesses as RankProcesses
from pycomm.tools.launching.processes import connect as connect
from pycomm.tools.launching.processes import join as join
from pycomm.tools.launching.processes import rendezvous as rendezvous
from pycomm.tools.launching.reporting import progress as progress
from pycomm.tools.launching.serving import Failure as Failure
from pycomm.tools.launching.serving import RankError as RankError
from pycomm.tools.launching.serving import Send as Send
from pycomm.tools.launching.serving import explain as explain
from pycomm.tools.launching.serving import send as send
from pycomm.tools.launching.serving import serve as serve
from pycomm.tools.launching.starts import store_of_start as store_of_start
