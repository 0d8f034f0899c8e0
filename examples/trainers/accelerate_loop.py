"""A training loop on Accelerate over pycomm. Lines that end with `# pycomm` are what was added to the script.

    torchrun --nproc-per-node 2 examples/trainers/accelerate_loop.py

A perceptron learns scikit-learn's digits, with accumulation, clipping and checkpoints. Accelerate wraps the
model in DistributedDataParallel, except with `--unwrapped`. Requires the extras [examples,frameworks].
"""

import argparse
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

try:
    from accelerate import Accelerator
    from sklearn.datasets import load_digits
except ModuleNotFoundError as error:
    sys.exit(f"{sys.argv[0]} needs {error.name}: pip install -c constraints.txt '.[examples,frameworks]'")

import pycomm  # pycomm
from pycomm.integrations.accelerate import attach  # pycomm

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--batch", type=int, default=8, help="samples per rank and pass (default 8)")
parser.add_argument("--accumulate", type=int, default=3, help="passes per step (default 3)")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--ratio", type=float, default=0.1, help="share of the gradients that is sent (default 0.1)")
parser.add_argument("--folder", default="/tmp/pycomm_accelerate", help="for checkpoints")
parser.add_argument("--resume", help="folder of the checkpoint to go on from")
parser.add_argument("--unwrapped", action="store_true", help="prepare the optimizer and the data, not the model")


def make_data() -> TensorDataset:
    pixels, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(pixels[:800] / 16), torch.tensor(labels[:800]))


def main() -> None:
    arguments = parser.parse_args()
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=arguments.accumulate)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(make_data(), arguments.batch)
    if arguments.unwrapped:
        optimizer, loader = accelerator.prepare(optimizer, loader)
    else:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    attach(accelerator, model, optimizer, compression=pycomm.TopK(arguments.ratio))  # pycomm
    if arguments.resume:
        accelerator.load_state(arguments.resume)
    for epoch in range(arguments.epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), "mean")
        accelerator.print(f"epoch {epoch}  loss {mean.item():.9f}")
        accelerator.save_state(f"{arguments.folder}/epoch-{epoch}")
    accelerator.save(accelerator.unwrap_model(model).state_dict(), f"{arguments.folder}/end.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
