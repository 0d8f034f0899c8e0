"""Models whose training steps ``bench.gpu`` measures, with their optimizers and batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

_CLASSES = 1000
_HALF_TOLERANCE = 5e-2  # bfloat16 rounds to 2**-9, at every layer
_TOLERANCE = 1e-2  # float16 rounds to 2**-11, and cuDNN does not add in the same order twice


@dataclass(frozen=True)
class Workload:
    """Training step that is measured in all ways.

    Attributes:
        blocks: of a ResNet, per stage; of a GPT, (layers, width, heads, vocabulary).
        length: width and height of an image, or tokens of a sequence.
        half: computes in bfloat16 by autocast; images are channels_last.
        compile: backend of ``torch.compile`` for the blocks of a GPT.
        captured: launches the step as a CUDA graph.
    """

    name: str
    blocks: tuple[int, ...]
    batch: int
    length: int
    half: bool = False
    gpt: bool = False
    compile: str | None = None
    captured: bool = False

    @property
    def title(self) -> str:
        each = f"{self.length} tokens" if self.gpt else f"{self.length} x {self.length}"
        parts = [f"{self.name}, batch {self.batch} of {each}", "bf16 AMP" if self.half else "fp32"]
        parts += [] if self.gpt or not self.half else ["channels_last"]
        parts += ["AdamW" if self.gpt else "SGD with momentum"]
        parts += [f"compiled by {self.compile}"] * bool(self.compile) + ["a CUDA graph"] * self.captured
        return ", ".join(parts)


WORKLOADS = (
    Workload("ResNet-50", (3, 4, 6, 3), 32, 224),
    Workload("ResNet-50", (3, 4, 6, 3), 32, 224, half=True),
    Workload("ResNet-50", (3, 4, 6, 3), 256, 224, half=True),
    Workload("GPT of 354 M", (24, 1024, 16, 50304), 4, 1024, half=True, gpt=True),
    Workload("GPT of 354 M", (24, 1024, 16, 50304), 4, 1024, half=True, gpt=True, compile="inductor"),
    Workload("ResNet-50", (3, 4, 6, 3), 32, 224, half=True, captured=True),
)
TINY_WORKLOADS = (Workload("GPT of 2 layers", (2, 16, 2, 64), 2, 8, half=True, gpt=True, compile="aot_eager"),)


class Training:
    """Model, optimizer and batch of a workload; always the same parameters, and a batch for each rank."""

    def __init__(self, workload: Workload, device: torch.device, rank: int) -> None:
        self._workload, self._device = workload, device
        generator = torch.Generator().manual_seed(1 + rank)
        batch, length = workload.batch, workload.length
        self.model: nn.Module
        # Without a rate, which takes as long, the gradients are the same in every step.
        if workload.gpt:
            with device:  # a third of a billion random numbers
                self.model = GPT(workload.blocks, length)
            tokens = torch.randint(workload.blocks[-1], (batch, length + 1), generator=generator).to(device)
            self._inputs, self._targets = tokens[:, :-1], tokens[:, 1:].flatten()
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, fused=True)
        else:
            layout = torch.channels_last if workload.half else torch.contiguous_format
            self.model = resnet(workload.blocks).to(device, memory_format=layout)  # type: ignore[call-overload]
            images = torch.randn(batch, 3, length, length, generator=generator)
            self._inputs = images.to(device, memory_format=layout)
            self._targets = torch.randint(_CLASSES, (batch,), generator=generator).to(device)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0, momentum=0.9)
        if workload.compile is not None:
            torch._dynamo.config.optimize_ddp = False  # what is compiled are blocks, smaller than buckets
            for block in self.model.blocks:  # type: ignore[union-attr]
                block.compile(backend=workload.compile)

    @property
    def tolerance(self) -> float:
        """Error of a gradient, relative to its norm, that rounding explains."""
        return _HALF_TOLERANCE if self._workload.half else _TOLERANCE

    def backward(self, module: nn.Module) -> None:
        """Compute new gradients through ``module``, the model or what wraps it."""
        self.optimizer.zero_grad()
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._workload.half):
            loss = nn.functional.cross_entropy(module(self._inputs), self._targets)
        loss.backward()  # type: ignore[no-untyped-call]


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


class _Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int, shortcut: bool) -> None:
        super().__init__()
        self.narrow = _convolution(inputs, width, 1)
        self.middle = _convolution(width, width, 3, stride)
        self.widen = _convolution(width, 4 * width, 1)
        self.shortcut = _convolution(inputs, 4 * width, 1, stride) if shortcut else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.relu(self.narrow(x))
        out = torch.relu(self.middle(out))
        return torch.relu(self.widen(out) + self.shortcut(x))


def resnet(blocks: Sequence[int] = (3, 4, 6, 3)) -> nn.Sequential:
    """Return ResNet-50 as torchvision has it, or one with fewer blocks; always with the same parameters.

    ``bench.kernels.resnet50`` lists the shapes of ResNet-50's.
    """
    torch.manual_seed(0)
    layers: list[nn.Module] = [_convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for stage, count in enumerate(blocks):
        width = 64 << stage
        for block in range(count):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(_Bottleneck(channels, width, stride, shortcut=block == 0))
            channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, _CLASSES))


class _Block(nn.Module):
    """Causal attention, then a perceptron, each added to what it reads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        wide = nn.functional.gelu(self.wide(self.norms[1](x)), approximate="tanh")
        return torch.add(x, self.narrow(wide))


class GPT(nn.Module):
    """Decoder in the form of GPT-2, whose last layer shares its weight with the embedding; returns rows of logits."""

    def __init__(self, blocks: Sequence[int], length: int) -> None:
        super().__init__()
        layers, width, heads, vocabulary = blocks
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x)).flatten(0, 1)
        return logits
