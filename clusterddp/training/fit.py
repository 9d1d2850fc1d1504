"""Whether a model and a dataset fit together, where one of them is a person's own."""

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from clusterddp.data import rng
from clusterddp.data.in_memory import Images, as_images
from clusterddp.data.loader import Loaded
from clusterddp.errors import DataError, TrainingError
from clusterddp.request import user_functions
from clusterddp.request.train_config import TrainConfig


def check(
    config: TrainConfig, model: nn.Module, train_set: Images | Loaded, test_set: Images | Loaded
) -> None:
    """Try one image, and hold the labels to the classes that the model scores.

    The rank's random numbers stay what they were, and so do the model's statistics. Raises
    TrainingError for a model that cannot take the images or gives no scores, DataError for labels
    that are none of its classes.
    """
    what = f"--model {config.model} with --dataset {config.dataset}"
    [(images, _)] = train_set.batches(torch.zeros(1, dtype=torch.int64), 1)
    images = as_images(images)
    was_training = model.training
    model.eval()
    tried = f"{what} on images {tuple(images.shape)}"
    is_own = user_functions.is_reference(config.model)
    try:
        with (
            rng.kept(images.device),
            torch.no_grad(),
            user_functions.running(tried) if is_own else nullcontext(),
        ):
            scores = model(images)
    except (RuntimeError, ValueError) as error:  # the latter from Keras
        if isinstance(error, torch.cuda.OutOfMemoryError):
            raise
        raise TrainingError(
            f"{tried}: this model is made for images (N, 1, 28, 28). Give one of your own, --model "
            "MODULE:FUNCTION, or images of that shape."
        ) from None
    model.train(was_training)
    seen = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
    if not (isinstance(scores, Tensor) and scores.dim() == 2 and len(scores) == 1):
        raise TrainingError(
            f"{what}: a model has to give scores (N, classes) for N images, and gave {seen} for 1."
        )
    try:
        for each in (train_set, test_set):
            each.expect(scores.shape[1])
    except DataError as error:
        raise DataError(f"{what}: {error}") from None
