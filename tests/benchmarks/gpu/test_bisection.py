"""`bisect` over a fake attempt."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import combinations

import pytest

from benchmarks.gpu.bisection import Found, bisect
from benchmarks.gpu.triage import SWITCHES

NAMES = list(SWITCHES["cuda"])


class Attempts:
    """A machine on which some components are broken; `most`: attempts that there is time for."""

    def __init__(self, works: Callable[[set[str]], bool], most: int = 1000) -> None:
        self.works = works
        self.most = most
        self.tried: list[set[str]] = []

    def __call__(self, off: Collection[str]) -> bool | None:
        if len(self.tried) == self.most:
            return None
        self.tried.append(set(off))
        return self.works(set(off))


def broken(*names: str) -> Attempts:
    return Attempts(lambda off: off.issuperset(names))


@pytest.mark.parametrize("name", NAMES)
def test_one_fault_is_found_with_four_attempts_and_one_that_confirms_it(name: str) -> None:
    attempts = broken(name)
    assert bisect(NAMES, attempts) == Found([name], [name], True)
    assert len(NAMES) == 16 and len(attempts.tried) <= 5


@pytest.mark.parametrize("number", [2, 3])
def test_several_faults_are_found(number: int) -> None:
    for names in combinations(NAMES, number):
        attempts = broken(*names)
        found = bisect(NAMES, attempts)
        assert set(found.guilty) == set(names) == set(found.safe) and found.complete
        assert len(attempts.tried) <= 5 * number + number


def test_a_fault_that_only_another_switch_brings_into_use_is_dropped() -> None:
    """Without sgl-kernel the norms are Triton's, and wrong; but the fault is a recording."""

    def works(off: set[str]) -> bool:
        norm_is_wrong = "sgl-kernel" in off and not off & {"triton", "triton:rms_norm"}
        return "decode_graphs" in off and not norm_is_wrong

    found = bisect(NAMES, Attempts(works))
    assert found.guilty == ["decode_graphs"]


def test_a_fault_that_switching_off_another_one_needs_is_kept() -> None:
    def works(off: set[str]) -> bool:
        return "fa3" in off and bool(off & {"triton:attention", "triton"})

    found = bisect(NAMES, Attempts(works))
    assert set(found.guilty) == {"fa3", "triton:attention"}


@pytest.mark.parametrize("most", range(6))
def test_without_time_the_switches_that_are_known_to_suffice_are_off(most: int) -> None:
    names = {"decode_graphs", "triton:route"}
    attempts = Attempts(lambda off: off >= names, most)
    found = bisect(NAMES, attempts)
    assert not found.complete
    assert set(found.safe) >= names, (most, found)


def test_a_single_switch_needs_no_attempt() -> None:
    attempts = broken("a")
    assert bisect(["a"], attempts) == Found(["a"], ["a"], True)
    assert attempts.tried == []
