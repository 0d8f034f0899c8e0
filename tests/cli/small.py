"""Settings of a demo that is over in a moment."""

from __future__ import annotations

from pathlib import Path

from pycomm.cli.demo.settings import Settings, methods_for


def small_settings(compression: str, steps: int, output: str = "unused.png") -> Settings:
    """Return the settings of two ranks and a tiny model, with the method ``compression`` beside the usual ones."""
    return Settings(
        ranks=2,
        methods=methods_for([compression], 0.01),
        steps=steps,
        seed=0,
        batch=1,
        context=8,
        width=64,
        layers=1,
        output=Path(output),
    )
