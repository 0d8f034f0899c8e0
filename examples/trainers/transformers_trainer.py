"""Trainer of Hugging Face Transformers over pycomm. Lines that end with `# pycomm` are what was added to the script.

    torchrun --nproc-per-node 2 examples/trainers/transformers_trainer.py

A small language model learns to count modulo 20. Requires the extra [frameworks].
"""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import pycomm  # pycomm
from pycomm.integrations.transformers import PycommCallback  # pycomm

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--batch", type=int, default=8, help="sequences per rank and pass (default 8)")
parser.add_argument("--accumulate", type=int, default=3, help="passes per step (default 3)")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--ratio", type=float, default=0.1, help="share of the gradients that is sent (default 0.1)")
parser.add_argument("--folder", default="/tmp/pycomm_trainer", help="for checkpoints")
parser.add_argument("--resume", help="folder of the checkpoint to go on from")
parser.add_argument("--save-steps", type=int, default=10)


def make_data(count: int = 256, length: int = 16) -> list[dict[str, torch.Tensor]]:
    """Return sequences that count on from different numbers, in different steps."""
    begins, strides = torch.arange(count) % 20, torch.arange(count) % 3 + 1
    tokens = (begins[:, None] + strides[:, None] * torch.arange(length)) % 20
    return [{"input_ids": row, "labels": row} for row in tokens]


def make_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": 20}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**config, **dropout, bos_token_id=0, eos_token_id=0, use_cache=False))


def main() -> None:
    arguments = parser.parse_args()
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
        train_dataset=make_data(),
        callbacks=[PycommCallback(compression=pycomm.TopK(arguments.ratio))],  # pycomm
    )
    trainer.train(resume_from_checkpoint=arguments.resume)
    trainer.save_model(f"{arguments.folder}/end")


if __name__ == "__main__":
    main()
