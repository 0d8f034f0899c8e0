"""Parameter shapes of ResNet-50, as torchvision's ``resnet50`` has them."""

from __future__ import annotations

_BLOCKS = (3, 4, 6, 3)
_EXPANSION = 4

Shape = tuple[int, ...]


def parameter_shapes() -> list[Shape]:
    """Return the 161 shapes in the order of ``named_parameters()``; 25,557,032 elements in all."""
    channels = 64
    shapes = _convolution(3, channels, 7)
    for stage, blocks in enumerate(_BLOCKS):
        width = 64 << stage
        for block in range(blocks):
            shapes += _bottleneck(channels, width, shortcut=block == 0)
            channels = width * _EXPANSION
    return [*shapes, (1000, channels), (1000,)]


def _convolution(inputs: int, outputs: int, kernel: int) -> list[Shape]:
    """Return the shapes of a convolution without bias, and of its batch norm's weight and bias."""
    return [(outputs, inputs, kernel, kernel), (outputs,), (outputs,)]


def _bottleneck(inputs: int, width: int, shortcut: bool) -> list[Shape]:
    outputs = width * _EXPANSION
    shapes = _convolution(inputs, width, 1) + _convolution(width, width, 3) + _convolution(width, outputs, 1)
    return shapes + _convolution(inputs, outputs, 1) if shortcut else shapes
