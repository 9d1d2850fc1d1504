"""A dataset of your own: stripes in four directions, which are the classes.

`--dataset own_dataset:stripes` gives two tensors, which stay in memory. `--dataset
own_dataset:Stripes` is read image by image, as a set has to be that does not fit there.
"""

import math

import torch
from torch import Tensor
from torch.utils.data import Dataset

DIRECTIONS = 4
SIDE = 20


def stripes(data_dir: str, train: bool) -> tuple[Tensor, Tensor]:
    """Images (N, 1, 20, 20), float32, and labels (N,), int64.

    data_dir: what --data-dir says; these images come from no directory.
    """
    count = 2_000 if train else 500
    # Its own generator: all ranks have to get the same images, and the test set other ones.
    generator = torch.Generator().manual_seed(1 if train else 2)
    labels = torch.randint(DIRECTIONS, (count,), generator=generator)
    angle = (labels * (math.pi / DIRECTIONS)).view(-1, 1, 1)
    phase = torch.rand(count, 1, 1, generator=generator) * 2 * math.pi
    down, right = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    waves = torch.sin(angle.cos() * right + angle.sin() * down + phase)
    noise = torch.randn(count, SIDE, SIDE, generator=generator)
    return (waves + noise / 2).unsqueeze(1), labels


class Stripes(Dataset[tuple[Tensor, int]]):
    """The same as a dataset of single images, turned into mirror images at random."""

    def __init__(self, data_dir: str, train: bool) -> None:
        self.images, self.labels = stripes(data_dir, train)
        self.train = train

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Where a set on disk would open its file: an image (1, 20, 20), and its label."""
        image = self.images[index]
        if self.train and torch.rand(()) < 0.5:
            image = image.flip(1, 2)  # half a turn: stripes keep their direction
        return image, int(self.labels[index])
