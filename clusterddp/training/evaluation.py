"""Evaluates the test set over all ranks: accuracy, loss, confusion of classes, worst images.

Every image counts once, whatever the number of ranks: nothing is padded.
"""

import base64
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from clusterddp.data.loader import Images, Loaded, as_images, evaluation_order, generators_kept
from clusterddp.distributed.heartbeat import Phase
from clusterddp.run.records import EvaluationRecord, WorstImage

# Images that a rank evaluates at once; it changes the speed and the memory, not the result.
BATCH = 1000
_WORST = 24


@dataclass(frozen=True)
class Result:
    """The result of an evaluation, the same on every rank."""

    accuracy: float
    loss: float
    """Mean over all images."""
    confusion: Tensor
    """(classes, classes) counts: a row a label, a column a prediction."""
    worst: tuple[WorstImage, ...] = ()
    """The images of the highest loss, the highest first, without their pixels."""

    def record(self, step: int, test_set: Images | Loaded) -> EvaluationRecord:
        """Return the record of this result, with the worst images themselves."""
        order = torch.tensor([image.index for image in self.worst], dtype=torch.int64)
        shown = [image for batch, _ in test_set.batches(order, BATCH) for image in batch.cpu()]
        return EvaluationRecord(
            step,
            tuple(map(tuple, self.confusion.tolist())),
            tuple(_with_pixels(*each) for each in zip(self.worst, shown, strict=True)),
        )


def evaluate(
    model: nn.Module,
    test_set: Images | Loaded,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[None]],
    mark: Callable[[Phase], None] = lambda _: None,
) -> Result:
    """Evaluate the bare module: shares may differ in length, and DDP's forward would wait for ranks
    that have no batch left. Collective over the default process group.

    mark: called with each phase as it begins.
    """
    for buffer in model.buffers():  # of rank 0, as saved; of each rank they are its own
        dist.broadcast(buffer, src=0)
    share = evaluation_order(len(test_set), dist.get_rank(), dist.get_world_size())
    no_label = torch.zeros(0, dtype=torch.int64, device=device)
    batches = [(no_label, no_label, torch.zeros(0, device=device))]  # a rank can have no image
    classes = torch.zeros((), dtype=torch.int64, device=device)
    model.eval()
    # Random numbers of its own, so that training draws the same however often this is done.
    with generators_kept(device), torch.no_grad():
        for images, labels in test_set.batches(share, BATCH):
            mark(Phase.EVALUATE)
            with autocast():
                scores = model(as_images(images))
            losses = cross_entropy(scores.float(), labels, reduction="none")
            batches.append((labels, scores.argmax(1), losses))
            classes.fill_(scores.shape[1])
    model.train()
    mark(Phase.COUNT)
    dist.all_reduce(classes, dist.ReduceOp.MAX)
    return _joined(batches, share, int(classes), len(test_set))


def _joined(
    batches: list[tuple[Tensor, Tensor, Tensor]], share: Tensor, classes: int, count: int
) -> Result:
    labels, predicted, losses = (torch.cat(parts) for parts in zip(*batches, strict=True))
    confusion = torch.bincount(labels * classes + predicted, minlength=classes * classes).double()
    totals = torch.cat([confusion, losses.double().sum().view(1)])
    dist.all_reduce(totals)
    confusion, loss_sum = totals[:-1].view(classes, classes), float(totals[-1])
    counted = int(confusion.sum())
    assert counted == count, f"{counted} of {count} images were counted"
    highest = losses.topk(min(_WORST, len(losses))).indices
    own_rows = torch.full((_WORST, 4), -1.0, dtype=torch.float64, device=labels.device)
    own_rows[: len(highest)] = torch.stack(
        [part[highest].double() for part in (share.to(labels.device), labels, predicted, losses)], 1
    )
    gathered = [torch.empty_like(own_rows) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own_rows)
    rows = [row for row in torch.cat(gathered).tolist() if row[0] >= 0]
    rows.sort(key=lambda row: (-row[3], row[0]))
    return Result(
        accuracy=float(confusion.diagonal().sum()) / count,
        loss=loss_sum / count,
        confusion=confusion.long().cpu(),
        worst=tuple(
            WorstImage(int(index), int(label), int(taken), loss)
            for index, label, taken, loss in rows[:_WORST]
        ),
    )


def _with_pixels(worst: WorstImage, image: Tensor) -> WorstImage:
    """Add one channel of the image as bytes, stretched to the whole range where it is not bytes.

    An image of one dimension is a row of pixels.
    """
    image = image.view(1, -1) if image.dim() < 2 else image
    plane = image if image.dim() == 2 else image.reshape(-1, *image.shape[-2:])[0]
    if plane.dtype is not torch.uint8:
        plane = plane.float() - plane.min()
        plane = (plane * (255 / max(float(plane.max()), 1e-9))).to(torch.uint8)
    pixels = base64.b64encode(plane.contiguous().numpy().tobytes()).decode()
    return replace(worst, shape=tuple(plane.shape), pixels=pixels)
