"""Ray Train's TorchTrainer over pycomm. Lines that end with `# pycomm` are what was added or changed in the script.

    python examples/trainers/ray_train.py --workers 2

A perceptron learns scikit-learn's digits; checkpoints go into Ray's storage. Requires the extras [examples,frameworks].
"""

import argparse
import sys
import tempfile
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

try:
    import ray.train
    from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
    from sklearn.datasets import load_digits
except ModuleNotFoundError as error:
    sys.exit(f"{sys.argv[0]} needs {error.name}: pip install -c constraints.txt '.[examples,frameworks]'")

import pycomm  # pycomm

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--batch", type=int, default=8, help="samples per worker and step (default 8)")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--ratio", type=float, default=0.1, help="share of the gradients that is sent (default 0.1)")
parser.add_argument("--folder", default="/tmp/pycomm_ray", help="Ray's storage")
parser.add_argument("--fail-after", type=int, help="epoch after which rank 0 fails, once")


def make_data() -> TensorDataset:
    pixels, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(pixels[:800] / 16), torch.tensor(labels[:800]))


def train(config: dict[str, Any]) -> None:
    """Train on one worker; after a failure Ray calls this again, with the last checkpoint."""
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer}
    model = prepare_model(model, parallel_strategy=None)  # pycomm, instead of: model = prepare_model(model)
    parts["reducer"] = pycomm.attach(optimizer, model, compression=pycomm.TopK(config["ratio"]))  # pycomm
    loader = prepare_data_loader(DataLoader(make_data(), config["batch"]))
    first = 0
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(f"{folder}/rank-{rank}.pt", weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        first = saved["epoch"] + 1
    for epoch in range(first, config["epochs"]):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        with tempfile.TemporaryDirectory() as folder:
            saved = {name: part.state_dict() for name, part in parts.items()}
            torch.save({**saved, "epoch": epoch}, f"{folder}/rank-{rank}.pt")
            checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"loss": loss.item(), "epoch": epoch}, checkpoint=checkpoint)
        if epoch == config["fail_after"] and first == 0 and rank == 0:
            raise RuntimeError("a failure that was asked for")


def main() -> None:
    arguments = parser.parse_args()
    failures = ray.train.FailureConfig(max_failures=1)
    trainer = TorchTrainer(
        train,
        train_loop_config=vars(arguments),
        scaling_config=ray.train.ScalingConfig(num_workers=arguments.workers),
        run_config=ray.train.RunConfig("perceptron", arguments.folder, failure_config=failures),
    )
    result = trainer.fit()
    with result.checkpoint.as_directory() as folder:
        torch.save(torch.load(f"{folder}/rank-0.pt", weights_only=True)["model"], f"{arguments.folder}/end.pt")
    print(f"epoch {result.metrics['epoch']}  loss of rank 0 {result.metrics['loss']:.9f}")


if __name__ == "__main__":
    main()
