"""Lightning's Trainer over pycomm. Lines that end with `# pycomm` are what was added to the script.

    torchrun --nproc-per-node 2 examples/trainers/lightning_trainer.py

A perceptron learns scikit-learn's digits, with accumulation, clipping and checkpoints.
"""

import argparse
import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

try:
    import lightning
    from sklearn.datasets import load_digits
except ModuleNotFoundError as error:
    sys.exit(f"{sys.argv[0]} needs {error.name}: pip install -c constraints.txt '.[examples,frameworks]'")

import pycomm  # pycomm
from pycomm.integrations.lightning import PycommStrategy  # pycomm

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--batch", type=int, default=8, help="samples per rank and pass (default 8)")
parser.add_argument("--accumulate", type=int, default=3, help="passes per step (default 3)")
parser.add_argument("--devices", type=int, default=2)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--ratio", type=float, default=0.1, help="share of the gradients that is sent (default 0.1)")
parser.add_argument("--folder", default="/tmp/pycomm_lightning", help="for checkpoints")
parser.add_argument("--resume", help="checkpoint to go on from")


def make_data() -> TensorDataset:
    pixels, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(pixels[:800] / 16), torch.tensor(labels[:800]))


class Perceptron(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10)).double()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.layers(x), y)
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.print(f"epoch {self.current_epoch}  loss {self.trainer.callback_metrics['loss'].item():.6f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main() -> None:
    arguments = parser.parse_args()
    trainer = lightning.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=arguments.devices,
        strategy=PycommStrategy(compression=pycomm.TopK(arguments.ratio)),  # pycomm
        max_epochs=arguments.epochs,
        accumulate_grad_batches=arguments.accumulate,
        gradient_clip_val=0.5,
        callbacks=[lightning.pytorch.callbacks.ModelCheckpoint(arguments.folder, "{epoch}", save_top_k=-1)],
        use_distributed_sampler=False,  # it would shuffle
        **dict.fromkeys(("enable_progress_bar", "enable_model_summary", "logger"), False),
    )
    data = make_data()
    sampler = DistributedSampler(data, trainer.world_size, trainer.global_rank, shuffle=False)
    trainer.fit(Perceptron(), DataLoader(data, arguments.batch, sampler=sampler), ckpt_path=arguments.resume)
    trainer.save_checkpoint(f"{arguments.folder}/end.ckpt")


if __name__ == "__main__":
    main()
