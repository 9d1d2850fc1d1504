"""Changes training images at random, as `--augment` names it; each rank draws its own numbers."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from clusterddp.data.loader import as_images

_ROTATION_DEGREES = 10.0
_STRETCH = 0.1
"""Logarithm of the greatest factor, along the width and along the height."""
_SHIFT_PIXELS = 2.0


def affine(images: Tensor) -> Tensor:
    """Turn, stretch and shift each image by amounts of its own, evenly drawn.

    Up to 10 degrees, a tenth in width and height, and two pixels. Takes a batch as `as_images`
    does, returns images (N, C, H, W). What comes in from outside is the nearest pixel of the edge,
    so the background continues. Draws five numbers an image from torch's generator of the CPU,
    whatever the images' device: it is in checkpoints, so a resumed run draws what it would have
    drawn.
    """
    images = as_images(images)
    count, _, height, width = images.shape
    turn, wide, high, right, down = (2 * torch.rand(5, count) - 1).to(images.device)
    angle = turn * math.radians(_ROTATION_DEGREES)
    wide, high = torch.exp(wide * _STRETCH), torch.exp(high * _STRETCH)
    # In affine_grid's coordinates an image reaches from -1 to 1.
    right, down = right * (2 * _SHIFT_PIXELS / width), down * (2 * _SHIFT_PIXELS / height)
    cosine, sine = torch.cos(angle), torch.sin(angle)
    matrix = torch.stack([cosine * wide, -sine * high, right, sine * wide, cosine * high, down], 1)
    grid = affine_grid(matrix.view(count, 2, 3), list(images.shape), align_corners=False)
    return grid_sample(images, grid, padding_mode="border", align_corners=False)


AUGMENTATIONS: dict[str, Callable[[Tensor], Tensor]] = {"affine": affine}
