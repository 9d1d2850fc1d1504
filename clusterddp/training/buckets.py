"""Has DDP sum the gradients of a resumed run in the buckets of the run in one piece.

DDP arranges its buckets anew after a process's first backward, in the order in which that yields
the gradients (torch's Reducer, `rebuild_buckets`). Gloo's sum over three ranks and more depends on
where in a bucket a gradient lies, so the first step after a resume would differ by rounding.
"""

from collections.abc import Sequence

from torch.nn.parallel import DistributedDataParallel


def arrangement(ddp: DistributedDataParallel) -> list[int]:
    """Return the parameters' indices as the buckets hold them, arranging these now; collective.

    DDP itself would do so at the next forward pass. Empty where it never arranges them anew, as
    with find_unused_parameters, and before the first backward.
    """
    ddp.reducer._rebuild_buckets()
    ddp.logger.set_runtime_stats_and_log()  # type: ignore[union-attr] # set once it is made
    buckets = ddp._get_ddp_logging_data().get(  # type: ignore[no-untyped-call]
        "rebuilt_per_bucket_param_indices", ""
    )
    return [int(index) for bucket in buckets.split(",") for index in bucket.split()]


def arrange(ddp: DistributedDataParallel, indices: Sequence[int]) -> None:
    """Arrange the buckets of a wrapper that has done no backward yet; collective.

    A backward of zeros in this order stands for the first one: no forward, no buffers, and no
    gradient is left. With static_graph, or sparse gradients, the buckets stay as they are.
    """
    parameters, are_sparse = ddp._build_params_for_reducer()  # type: ignore[no-untyped-call]
    if ddp.static_graph or any(are_sparse) or sorted(indices) != list(range(len(parameters))):
        return
    ddp.reducer.prepare_for_backward([])
    for index in indices:
        (parameters[index].sum() * 0).backward()
    for parameter in parameters:
        parameter.grad = None
    ddp.reducer._rebuild_buckets()
