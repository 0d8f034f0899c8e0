"""Work of each rank: training every method in turns."""

from __future__ import annotations

import copy
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn

from pycomm.cli.demo.corpus import Corpus, random_starts, read_corpus, windows
from pycomm.cli.demo.messages import Message, Outcome, Progress, Results, Tell
from pycomm.cli.demo.model import ByteGPT, loss_of
from pycomm.cli.demo.settings import HEAD_WIDTH, TURN_STEPS, Settings
from pycomm.cli.demo.trainee import Trainee, average_over_ranks, first_difference

_VALIDATION_WINDOWS = 256
_VALIDATION_BATCH = 32
_VALIDATION_SEED = 2**31  # differs from every rank's
_REPORT_SECONDS = 0.2


def train(settings: Settings, tell: Tell) -> None:
    """Train every method in turns, on the default process group, and report the results. Collective.

    In turns and in the same processes: a machine that slows down for a while slows all methods down
    alike, and their ratios stay the same.
    """
    corpus = read_corpus()
    torch.manual_seed(settings.seed)
    untrained = ByteGPT(settings.width, settings.layers, settings.context, settings.width // HEAD_WIDTH)
    initial_loss = validate(untrained, corpus, settings)
    trainees = [Trainee(copy.deepcopy(untrained), method, settings.steps) for method in settings.methods]
    take_turns(trainees, corpus, settings, tell if dist.get_rank() == 0 else _say_nothing)
    for trainee in trainees:
        trainee.close()
        average_over_ranks(trainee.outcome)
        trainee.outcome.validation_loss = validate(trainee.model, corpus, settings)
        trainee.outcome.difference = first_difference(trainee.model)
    if dist.get_rank() == 0:
        num_parameters = sum(p.numel() for p in untrained.parameters())
        tell(Results(num_parameters, initial_loss, [trainee.outcome for trainee in trainees]))


def take_turns(trainees: list[Trainee], corpus: Corpus, settings: Settings, tell: Tell) -> None:
    """Step the runs in turns; step ``i`` of every run sees the same text, and every rank has its own."""
    # Every rank's seed differs from every other's, also from those of the next --seed.
    seed = settings.seed * settings.ranks + dist.get_rank()
    starts = random_starts(corpus.train, settings.context, (settings.steps, settings.batch), seed)
    for first in range(0, settings.steps, TURN_STEPS):
        turn = starts[first : first + TURN_STEPS]
        for run, trainee in enumerate(trainees):
            dist.barrier()  # else the first step would also wait for work left over from the turn before
            _take_turn(trainee, run, turn, corpus, settings, tell)


def _take_turn(trainee: Trainee, run: int, turn: torch.Tensor, corpus: Corpus, settings: Settings, tell: Tell) -> None:
    next_report = 0.0
    for number, row in enumerate(turn, 1):
        trainee.step(*windows(corpus.train, row, settings.context))
        if time.monotonic() >= next_report or number == len(turn):
            next_report = time.monotonic() + _REPORT_SECONDS
            tell(_progress(run, trainee.outcome))


def _progress(run: int, outcome: Outcome) -> Progress:
    losses, seconds = outcome.losses[-TURN_STEPS:], outcome.seconds[-TURN_STEPS:]
    return Progress(run, len(outcome.losses), statistics.fmean(losses), statistics.median(seconds))


def validate(model: nn.Module, corpus: Corpus, settings: Settings) -> float:
    """Return the mean loss over windows of the validation text, the same in every call and shared out to the ranks.

    Collective.
    """
    starts = random_starts(corpus.validation, settings.context, (_VALIDATION_WINDOWS,), _VALIDATION_SEED)
    total = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for batch in torch.split(starts[dist.get_rank() :: dist.get_world_size()], _VALIDATION_BATCH):
            inputs, targets = windows(corpus.validation, batch, settings.context)
            total += loss_of(model(inputs), targets, reduction="sum")
    dist.all_reduce(total)
    return total.item() / (_VALIDATION_WINDOWS * settings.context)


def _say_nothing(_message: Message) -> None:
    pass
