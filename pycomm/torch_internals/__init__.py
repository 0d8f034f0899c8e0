"""Private names of torch that pycomm uses, each behind a function that describes its use.

A new release of torch may break this package: tests/test_torch_internals.py checks each name's behavior, and that no
other file uses private names. This package has all names of its modules but :mod:`pycomm.torch_internals.pipelines`,
whose imports of torch take longer than all others, and :mod:`pycomm.torch_internals.wrappers`: few programs need them.
"""

from torch._C._distributed_c10d import GradBucket as GradBucket
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import Store as Store
from torch._C._distributed_c10d import Work

from pycomm.torch_internals.autograd import *  # noqa: F403
from pycomm.torch_internals.dtensors import *  # noqa: F403
from pycomm.torch_internals.groups import *  # noqa: F403
from pycomm.torch_internals.modules import *  # noqa: F403
from pycomm.torch_internals.optimizers import *  # noqa: F403
from pycomm.torch_internals.scripting import *  # noqa: F403
from pycomm.torch_internals.tensors import *  # noqa: F403
from pycomm.torch_internals.tracing import *  # noqa: F403

TorchWork = Work
