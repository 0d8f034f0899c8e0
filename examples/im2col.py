"""Intra-operator parallelism on the cores of one device: a convolution as a matrix product, its rows over threads.

    python examples/im2col.py
    python examples/im2col.py --threads 1 2 4 --channels 128

im2col writes every patch under the kernel as a column. The convolution is then one product: weights
``[out channels, in channels * kernel * kernel]`` times columns ``[in channels * kernel * kernel, positions]``
(Chellapilla, Puri and Simard 2006, section 3). Each row of that product, an output channel, requires only its own row
of the weights and all columns. So each core computes some of the rows, and nothing has to be summed. Over devices the
same split is called "columns", because torch stores a layer's weights transposed: see examples/split_layer.py.
"""

from __future__ import annotations

import argparse
import os
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import torch
from torch.nn import functional


def parse() -> argparse.Namespace:
    cores = os.cpu_count() or 1
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, cores], help="numbers of threads to compare")
    parser.add_argument("--channels", type=int, default=256, help="in and out (default 256)")
    parser.add_argument("--size", type=int, default=56, help="height and width of a picture (default 56)")
    parser.add_argument("--batch", type=int, default=4, help="pictures (default 4)")
    parser.add_argument("--rounds", type=int, default=7, help="timings of which the median is told (default 7)")
    arguments = parser.parse_args()
    if min(arguments.threads) < 1 or max(arguments.threads) > arguments.channels:
        parser.error(f"--threads: {arguments.threads}, wanted 1 to {arguments.channels}, the number of channels")
    return arguments


def im2col(x: torch.Tensor, kernel: int) -> torch.Tensor:
    """Return the patches of ``x`` ``[batch, channels, h, w]``, as columns: ``[channels * kernel^2, batch * h * w]``.

    Edges are padded with zeros, so that there is a patch for every position.
    """
    batch, channels, height, width = x.shape
    padded = functional.pad(x, [kernel // 2] * 4)
    patches = padded.unfold(2, kernel, 1).unfold(3, kernel, 1)  # a view: [batch, channels, h, w, kernel, kernel]
    return patches.permute(1, 4, 5, 0, 2, 3).reshape(channels * kernel * kernel, batch * height * width)


def convolve(pool: ThreadPoolExecutor, parts: int, columns: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return ``[out channels, positions]``: each of ``parts`` threads multiplies its own rows of ``weight``."""
    rows = weight.flatten(1)
    out = torch.empty(len(rows), columns.shape[1], dtype=columns.dtype)
    jobs = zip(rows.tensor_split(parts), out.tensor_split(parts), strict=True)
    for job in [pool.submit(torch.mm, part, columns, out=target) for part, target in jobs]:
        job.result()
    return out


def main() -> None:
    arguments = parse()
    kernel, channels = 3, arguments.channels
    x = torch.randn(arguments.batch, channels, arguments.size, arguments.size)
    weight = torch.randn(channels, channels, kernel, kernel)
    columns = im2col(x, kernel)
    expected = functional.conv2d(x.double(), weight.double(), padding=kernel // 2).transpose(0, 1).flatten(1)
    seconds: dict[int, list[float]] = {count: [] for count in arguments.threads}
    # torch uses one thread in each of these threads, so no others compute.
    with ThreadPoolExecutor(max(arguments.threads), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for _ in range(arguments.rounds):
            for count in seconds:
                start = time.perf_counter()
                out = convolve(pool, count, columns, weight)
                seconds[count].append(time.perf_counter() - start)
                torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-3)
    first = median(seconds[arguments.threads[0]])
    print(f"{channels} to {channels} channels, {kernel} x {kernel}, {arguments.batch} pictures of {arguments.size}^2")
    for count, taken in seconds.items():
        gflops = 2 * weight.numel() * columns.shape[1] / median(taken) / 1e9
        milliseconds, rows = 1e3 * median(taken), f"{-(-channels // count)} rows each"
        print(
            f"{count} threads, {rows}: {milliseconds:.1f} ms, {gflops:.0f} GFLOP/s, x {1e3 * first / milliseconds:.2f}"
        )


if __name__ == "__main__":
    main()
