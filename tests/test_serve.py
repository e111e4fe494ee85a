"""What a process that computes says to OpenMP before torch is imported."""

import os

import pytest

from tools.serve import SPINS, set_threads

NAMES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


@pytest.mark.parametrize(
    ("given", "spins"),
    [
        ({}, SPINS),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "active"}, None),
        ({"OMP_NUM_THREADS": "64"}, SPINS),
    ],
)
def test_threads_sleep_unless_the_user_says_otherwise(
    given: dict[str, str], spins: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NAMES:  # set first: so that all of them are put back
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    set_threads(3)
    assert os.environ["OMP_NUM_THREADS"] == "3"
    assert os.environ.get("GOMP_SPINCOUNT") == spins
