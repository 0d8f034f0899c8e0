"""Trainer of Hugging Face Transformers over pycomm. Lines that end with `# pycomm` are what was added to the script.

    torchrun --nproc-per-node 2 examples/trainers/transformers_trainer.py

A small vision transformer learns scikit-learn's digits. Requires the extras [examples,frameworks].
"""

import argparse
import sys
from typing import Any

import torch

try:
    from sklearn.datasets import load_digits
    from transformers import EvalPrediction, Trainer, TrainingArguments, ViTConfig, ViTForImageClassification
except ModuleNotFoundError as error:
    sys.exit(f"{sys.argv[0]} needs {error.name}: pip install -c constraints.txt '.[examples,frameworks]'")

import pycomm  # pycomm
from pycomm.integrations.transformers import PycommCallback  # pycomm

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--batch", type=int, default=8, help="pictures per rank and pass (default 8)")
parser.add_argument("--accumulate", type=int, default=3, help="passes per step (default 3)")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--ratio", type=float, default=0.1, help="share of the gradients that is sent (default 0.1)")
parser.add_argument("--folder", default="/tmp/pycomm_trainer", help="for checkpoints")
parser.add_argument("--resume", help="folder of the checkpoint to go on from")
parser.add_argument("--save-steps", type=int, default=10)


def make_data() -> list[dict[str, Any]]:
    pixels, labels = load_digits(return_X_y=True)
    pictures = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    return [{"pixel_values": picture, "labels": int(label)} for picture, label in zip(pictures, labels, strict=True)]


def make_model() -> ViTForImageClassification:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=2, num_channels=1, num_labels=10))


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}


def main() -> None:
    arguments, data = parser.parse_args(), make_data()
    training = TrainingArguments(
        output_dir=arguments.folder,
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=arguments.batch,
        gradient_accumulation_steps=arguments.accumulate,
        max_steps=arguments.steps,
        max_grad_norm=0.5,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=arguments.save_steps,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=make_model(),
        args=training,
        train_dataset=data[:1440],
        eval_dataset=data[1440:],
        compute_metrics=accuracy,
        callbacks=[PycommCallback(compression=pycomm.TopK(arguments.ratio))],  # pycomm
    )
    trainer.train(resume_from_checkpoint=arguments.resume)
    trainer.evaluate()
    trainer.save_model(f"{arguments.folder}/end")


if __name__ == "__main__":
    main()
