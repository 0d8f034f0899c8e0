"""Planning: how to split a model over devices, by memory and time, before anything runs.

    made = profile(make_model, make_batch, loss)               # bytes and FLOPs by layer, without memory
    task = Task(devices=8, memory=10e9, batch=64, device=Device(flops=1e13))
    ranking = choose(task, model, profile_of, styles_of)       # what fits, fastest first, and why the rest was refused
    ranking.options[0].plan()                                  # what split() and Pipeline() take

``sizes`` uses only the layers' sizes. ``scaling`` predicts the throughput of more devices: T = S N e.
"""

from pycomm.parallel.planning.candidates import OPTIMIZERS as OPTIMIZERS
from pycomm.parallel.planning.candidates import Candidate as Candidate
from pycomm.parallel.planning.candidates import Device as Device
from pycomm.parallel.planning.candidates import Layer as Layer
from pycomm.parallel.planning.candidates import Part as Part
from pycomm.parallel.planning.candidates import Profile as Profile
from pycomm.parallel.planning.candidates import Task as Task
from pycomm.parallel.planning.candidates import measure_device as measure_device
from pycomm.parallel.planning.candidates import with_seconds as with_seconds
from pycomm.parallel.planning.choose import Option as Option
from pycomm.parallel.planning.choose import Ranking as Ranking
from pycomm.parallel.planning.choose import Refusal as Refusal
from pycomm.parallel.planning.choose import choose as choose
from pycomm.parallel.planning.price import Memory as Memory
from pycomm.parallel.planning.price import Price as Price
from pycomm.parallel.planning.price import Pricer as Pricer
from pycomm.parallel.planning.price import Times as Times
from pycomm.parallel.planning.profile import make_without_memory as make_without_memory
from pycomm.parallel.planning.profile import profile as profile
from pycomm.parallel.planning.sizes import Layout as Layout
from pycomm.parallel.planning.sizes import place as place
