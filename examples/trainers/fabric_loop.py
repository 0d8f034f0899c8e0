"""A training loop on Lightning Fabric over pycomm. Lines that end with `# pycomm` are what was added to the script.

    torchrun --nproc-per-node 2 examples/trainers/fabric_loop.py

A perceptron learns scikit-learn's digits, with accumulation, clipping and checkpoints. Requires the extras
[examples,frameworks].
"""

import argparse
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

try:
    from lightning.fabric import Fabric
    from sklearn.datasets import load_digits
except ModuleNotFoundError as error:
    sys.exit(f"{sys.argv[0]} needs {error.name}: pip install -c constraints.txt '.[examples,frameworks]'")

import pycomm  # pycomm
from pycomm.integrations.lightning import PycommFabricStrategy  # pycomm

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--batch", type=int, default=8, help="samples per rank and pass (default 8)")
parser.add_argument("--accumulate", type=int, default=3, help="passes per step (default 3)")
parser.add_argument("--devices", type=int, default=2)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--ratio", type=float, default=0.1, help="share of the gradients that is sent (default 0.1)")
parser.add_argument("--folder", default="/tmp/pycomm_fabric", help="for checkpoints")
parser.add_argument("--resume", help="checkpoint to go on from")


def make_data() -> TensorDataset:
    pixels, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(pixels[:800] / 16), torch.tensor(labels[:800]))


def main() -> None:
    arguments = parser.parse_args()
    fabric = Fabric(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=arguments.devices,
        strategy=PycommFabricStrategy(compression=pycomm.TopK(arguments.ratio)),  # pycomm
    )
    fabric.launch()
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10)).double()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    loader = fabric.setup_dataloaders(DataLoader(make_data(), arguments.batch))
    if arguments.resume:
        fabric.load(arguments.resume, {"model": model, "optimizer": optimizer})
    for epoch in range(arguments.epochs):
        for index, (x, y) in enumerate(loader, 1):
            is_last = index % arguments.accumulate == 0 or index == len(loader)
            with fabric.no_backward_sync(model, enabled=not is_last):
                loss = nn.functional.cross_entropy(model(x), y)
                fabric.backward(loss / arguments.accumulate)
            if is_last:
                fabric.clip_gradients(model, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
        fabric.print(f"epoch {epoch}  loss {fabric.all_reduce(loss.detach(), reduce_op='mean').item():.9f}")
        fabric.save(f"{arguments.folder}/epoch={epoch}.ckpt", {"model": model, "optimizer": optimizer})
    fabric.save(f"{arguments.folder}/end.ckpt", {"model": model})


if __name__ == "__main__":
    main()
