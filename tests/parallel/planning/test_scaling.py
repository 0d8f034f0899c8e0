"""The efficiency model: its forms, fits to points that a form made, and points that make no sense."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from pycomm.parallel.planning import scaling
from pycomm.parallel.planning.scaling import Fit, all_reduce_seconds, by_network, collected, fit, predict, read_points
from pycomm.schedule import Link, Network, load


def named(fits: list[Fit], form: str) -> Fit:
    return next(each for each in fits if each.form == form)


def test_published_speedups() -> None:
    """Gustafson's 1,024 processors, whose serial parts of 0.4 to 0.8 % make speedups of 1,016 to 1,020."""
    for serial, speedup in ((0.004, 1020), (0.005, 1019), (0.008, 1016)):
        assert 1024 * scaling.gustafson(1024, serial) == pytest.approx(speedup, abs=0.5)
    assert 1024 * scaling.amdahl(1024, 0.004) == pytest.approx(201, abs=0.5)
    assert 10 * scaling.amdahl(10, 0.5) == pytest.approx(1 / (0.5 + 0.5 / 10), rel=1e-14)


def communication(devices: int) -> float:
    return 0.1 * (devices - 1) / devices


@pytest.mark.parametrize(
    ("form", "efficiency", "parameter"),
    [
        ("amdahl", scaling.amdahl, 0.03),
        ("amdahl", scaling.amdahl, 0.0),
        ("amdahl", scaling.amdahl, 1.0),
        ("gustafson", scaling.gustafson, 0.25),
        ("constant", scaling.constant, 0.8),
        ("network", by_network(communication), 3.5),
    ],
)
def test_a_form_is_found_again(form: str, efficiency: scaling.Efficiency, parameter: float) -> None:
    points = {count: 123.0 * count * efficiency(count, parameter) for count in (1, 2, 4, 7, 16)}
    found = named(fit(points, communication), form)
    assert found.parameter == pytest.approx(parameter, rel=1e-6, abs=1e-9)
    assert found.throughput == pytest.approx(123.0, rel=1e-7)
    assert found.residual < 1e-7
    assert found.total(4096) == pytest.approx(123.0 * 4096 * efficiency(4096, parameter), rel=1e-5)
    if 0 < parameter < 1:
        assert fit(points, communication)[0].form == form


def test_the_fit_has_the_least_error() -> None:
    points = {1: 100.0, 2: 190.0, 4: 350.0, 8: 590.0}
    count, measured = np.array(list(points)), np.array(list(points.values()))
    found = named(fit(points), "amdahl")
    serial = np.linspace(0, 0.2, 2001)[:, None, None]
    one = np.linspace(90, 110, 401)[:, None]
    errors = one * count / (1 + serial * (count - 1)) / measured - 1
    least = math.sqrt((errors**2).mean(-1).min())
    assert found.residual == pytest.approx(least, rel=1e-3)
    assert found.residual <= least


def test_points_that_rise_faster_than_devices() -> None:
    for each in fit({1: 100.0, 2: 250.0, 4: 700.0}):
        assert each.efficiency(4) == 1
        assert each.residual > 0.1


def test_without_one_device_nothing_tells_constant_efficiency() -> None:
    assert {each.form for each in fit({2: 190.0, 4: 350.0})} == {"amdahl", "gustafson"}


def test_prediction_from_a_network() -> None:
    link = Link(alpha=0, beta=1e-9, gamma=0)
    network = Network(name="n", within_host=link, between_hosts=link)
    seconds = all_reduce_seconds(1e8, network)
    # 2 (P - 1) / P of 0.1 s, by an algorithm that has the fewest bytes.
    assert seconds(4) == pytest.approx(0.15, rel=1e-9)
    assert seconds(1) == 0
    found = predict(0.3, seconds, overlap=0.5)
    assert found.total(4) == pytest.approx(4 / (0.3 + 0.075), rel=1e-9)
    assert found.efficiency(1) == 1
    measured = Network(
        name="m", within_host=link, between_hosts=link, measured={"native": ((1e8, 0.6),)}, measured_ranks=4
    )
    assert predict(0.3, all_reduce_seconds(1e8, measured)).efficiency(4) == pytest.approx(1 / 3, rel=1e-12)


def test_efficiency_of_many_never_exceeds_that_of_few() -> None:
    seconds = all_reduce_seconds(1e8, load("infiniband-100g"))
    found = predict(0.05, seconds)
    efficiencies = [found.efficiency(1 << i) for i in range(10)]
    assert efficiencies == sorted(efficiencies, reverse=True)


def test_points_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "points.json"
    file.write_text(json.dumps([[4, 350], [1, 100.5], [4, 350]]))
    assert list(read_points(file).items()) == [(1, 100.5), (4, 350.0)]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "cannot be read"),
        ("[" * 100000, "cannot be read"),
        ('{"1": 100}', "wanted [[devices, throughput], ...]"),
        ("[[1, 100, 3], [2, 3]]", "wanted [[devices"),
        ("[[1, 100], [1, 101]]", "1 devices have throughputs 100 and 101, wanted one"),
        ("[[1, 100], [2, NaN]]", "throughput of 2 devices is nan"),
        ('[[1, 100], [2, "many"]]', "throughput of 2 devices is 'many'"),
        ("[[1, 100], [2, true]]", "throughput of 2 devices is True"),
        ("[[1.5, 100], [2, 3]]", "number of devices is 1.5"),
        ("[[[1], 100], [2, 3]]", "number of devices is [1]"),
    ],
)
def test_files_that_are_wrong(content: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "points.json"
    file.write_text(content)
    with pytest.raises(ValueError) as caught:  # noqa: PT011, the message is compared below
        read_points(file)
    assert says in str(caught.value)
    assert str(file) in str(caught.value)
    with pytest.raises(ValueError, match="cannot be read"):
        read_points(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("points", "says"),
    [
        ({}, "there are 0 points"),
        ({1: 100.0}, "there are 1 points"),
        ({0: 100.0, 1: 1.0}, "number of devices is 0"),
        ({-1: 100.0, 1: 1.0}, "number of devices is -1"),
        ({1: 100.0, 5000: 1.0}, "number of devices is 5000"),
        ({1: 100.0, 2: 0.0}, "throughput of 2 devices is 0"),
        ({1: 100.0, 2: -3.0}, "throughput of 2 devices is -3"),
        ({1: 100.0, 2: math.nan}, "throughput of 2 devices is nan"),
        ({1: 100.0, 2: math.inf}, "throughput of 2 devices is inf"),
    ],
)
def test_points_that_make_no_sense(points: dict[int, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        fit(points)


def test_other_mistakes() -> None:
    with pytest.raises(ValueError, match="2 devices have throughputs 3.0 and 4.0"):
        collected([(2, 3.0), (2, 4.0)])
    for step in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="step is"):
            predict(step, communication)
    with pytest.raises(ValueError, match="overlap is 1.5, wanted from 0 to 1"):
        predict(1.0, communication, 1.5)
