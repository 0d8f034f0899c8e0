"""Private names of torch that pycomm uses, each behind a function that says what it is used for.

This is the package that a new release of torch may break: tests/test_torch_internals.py checks each name's
behaviour, and that no other file uses any private name. :mod:`pycomm.torch_internals.pipelines` is imported by those
who need it: what it imports of torch takes longer than all the rest.
"""

from torch._C._distributed_c10d import GradBucket, PrefixStore, Store
from torch._C._distributed_c10d import Work as TorchWork

from pycomm.torch_internals.autograd import (
    accumulation_hooks,
    calls_hooks_of_running_nodes,
    compiles_autograd,
    current_graph_task,
    current_node,
    queue_final_callback,
)
from pycomm.torch_internals.dtensors import Sharded, dtensor_around, is_dtensor, local_of
from pycomm.torch_internals.groups import (
    backend_of,
    has_joined_gloo,
    make_process_group,
    number_process_group,
    open_monitored_barrier,
    owns_process_group,
    root_store,
    store_of,
)
from pycomm.torch_internals.modules import (
    ShardedGroup,
    active_ddp_module,
    buffers_of,
    children_of,
    communication_hooks,
    convolve,
    divides_by_active_ranks,
    has_parts,
    sharded_groups,
    uncompiled,
    zero_buckets,
)
from pycomm.torch_internals.optimizers import (
    leave_scale_to_step,
    replace_step,
    take_scale,
    undo_leave_scale_to_step,
    unhooked_step,
    unscale_as_grad_scaler,
    wrapped_by_scheduler,
)
from pycomm.torch_internals.scripting import has_scripted, is_recording, leave_out_of_scripts, prepare_scripts
from pycomm.torch_internals.tensors import (
    StorageWatch,
    is_flat_parameter,
    move_to_shared_mapping,
    note_writes,
    steps_in_backward,
    storage_identity,
    storage_uses,
    uses_outside_python,
    version_of,
)
from pycomm.torch_internals.tracing import (
    attention_flops,
    fake_tensors,
    has_compiled,
    is_profiling,
    profiled_range,
    without_torch_function,
)

__all__ = [
    "GradBucket",
    "PrefixStore",
    "Sharded",
    "ShardedGroup",
    "StorageWatch",
    "Store",
    "TorchWork",
    "accumulation_hooks",
    "active_ddp_module",
    "attention_flops",
    "backend_of",
    "buffers_of",
    "calls_hooks_of_running_nodes",
    "children_of",
    "communication_hooks",
    "compiles_autograd",
    "convolve",
    "current_graph_task",
    "current_node",
    "divides_by_active_ranks",
    "dtensor_around",
    "fake_tensors",
    "has_compiled",
    "has_joined_gloo",
    "has_parts",
    "has_scripted",
    "is_dtensor",
    "is_flat_parameter",
    "is_profiling",
    "is_recording",
    "leave_out_of_scripts",
    "leave_scale_to_step",
    "local_of",
    "make_process_group",
    "move_to_shared_mapping",
    "note_writes",
    "number_process_group",
    "open_monitored_barrier",
    "owns_process_group",
    "prepare_scripts",
    "profiled_range",
    "queue_final_callback",
    "replace_step",
    "root_store",
    "sharded_groups",
    "steps_in_backward",
    "storage_identity",
    "storage_uses",
    "store_of",
    "take_scale",
    "uncompiled",
    "undo_leave_scale_to_step",
    "unhooked_step",
    "unscale_as_grad_scaler",
    "uses_outside_python",
    "version_of",
    "without_torch_function",
    "wrapped_by_scheduler",
    "zero_buckets",
]
