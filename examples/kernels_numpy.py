"""`pycomm.kernels` alone, on NumPy's arrays: two workers of one process send the largest 5 % of their gradients.

    python examples/kernels_numpy.py

Where there is a GPU, and CuPy (`pip install '.[cuda13]'`), the same lines run on arrays there.
"""

import importlib
from importlib.util import find_spec
from typing import Any

from common import load_digits

from pycomm import kernels

on_gpu = find_spec("cupy") is not None and kernels.cuda_devices()[0] > 0
xp = importlib.import_module("cupy" if on_gpu else "numpy")
(x, y), (test_x, test_y) = ([xp.asarray(part.numpy()) for part in data.tensors] for data in load_digits())

WIDTH, NUM_WORKERS = 128, 2
BORDER = 64 * WIDTH  # between the two layers' weights in flat arrays
size = BORDER + WIDTH * 10
count = size // 20  # elements that a worker sends


def layers(flat: Any) -> tuple[Any, Any]:
    return flat[:BORDER].reshape(64, WIDTH), flat[BORDER:].reshape(WIDTH, 10)


def gradient(x: Any, y: Any) -> Any:
    """Return the gradient of the mean cross-entropy of a perceptron, as one flat array."""
    first, second = layers(weights)
    hidden = xp.maximum(x @ first, 0)
    scores = xp.exp(hidden @ second)
    slope = scores / scores.sum(1, keepdims=True)
    slope[xp.arange(len(y)), y] -= 1
    slope /= len(y)
    back = (slope @ second.T) * (hidden > 0)
    return xp.concatenate([(x.T @ back).ravel(), (hidden.T @ slope).ravel()])


random = xp.random.RandomState(0)
weights = (0.1 * random.standard_normal(size)).astype("float32")
exp_avg, exp_avg_sq, mean = (xp.zeros(size, "float32") for _ in range(3))
residuals = [xp.zeros(size, "float32") for _ in range(NUM_WORKERS)]
sent = 0
for step in range(1, 401):
    mean[:] = 0
    for residual in residuals:
        batch = random.randint(0, len(x), 32)
        kernels.accumulate(residual, residual, gradient(x[batch], y[batch]))
        values, indices = kernels.topk(residual, count)
        residual[indices] = 0  # the rest is added to the next step's gradient
        words = kernels.pack_indices(indices, size)
        sent += values.nbytes + words.nbytes
        kernels.scatter_add(mean, kernels.unpack_indices(words, size, count), values, 1 / NUM_WORKERS)
    moments = kernels.Moments(betas=(0.9, 0.999), eps=1e-8, step=step)
    kernels.adam_step([weights], [mean], [exp_avg], [exp_avg_sq], lr=2e-3, moments=moments)
first, second = layers(weights)
right = float((xp.argmax(xp.maximum(test_x @ first, 0) @ second, 1) == test_y).mean())
dense = 4 * size * step * NUM_WORKERS
print(f"{xp.__name__}: accuracy {right:.3f}, {sent / 1e6:.2f} MB sent, {dense / 1e6:.2f} MB without selection")
