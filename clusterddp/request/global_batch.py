"""The batch over all ranks: what it was at a run's first start, whatever the world size now."""

from clusterddp.request.train_config import TrainConfig


def reference_world_size(config: TrainConfig, world_size: int, images: int, step_size: int) -> int:
    """World size by which a run that goes on from a checkpoint counts its batch and its rate.

    images: of a step over all ranks when the checkpoint was written; step_size: of one rank then.
    Where the batch size was changed on purpose, it counts for the ranks that there are now.
    """
    return images // step_size if step_size == config.step_size else world_size


def uneven(config: TrainConfig, reference: int, world_size: int) -> str:
    """Why so many ranks cannot share the batch of a run evenly; empty where they can.

    reference: the run's `reference_world_size`.
    """
    images = config.step_size * reference
    if images % world_size == 0:
        return ""
    passes = f" x --accumulate {config.accumulate}" if config.accumulate > 1 else ""
    return (
        f"the run's batch of {images} images over all ranks (--batch-size {config.batch_size}"
        f"{passes} x {reference} ranks at its start) cannot be shared by {world_size} ranks "
        f"evenly. Start it on a number of ranks that divides {images}."
    )
