"""A driver of Ray in a process of its own: its signals, its end, and the one that it did not choose."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.real_process
DEADLINE_S = 30.0
PROGRAM = """
import os, select, sys, time
from engine.supervisor.fleet import driver as module

def say(text):
    print(text, flush=True)

def drive(driver):
    open(os.path.join(driver.folder, "ray"), "w").close()
    say(f"folder {driver.folder}")
    DRIVE

module._AT_ONCE_S = 0.1
BEFORE
code, message = module.run_driver(drive, 60.0)
say(f"{code} {message}")
sys.exit(code)
"""
STUCK = 'say("up"); time.sleep(1000)'
SIGNAL_AFTER_FORK = """
import signal
fork = os.fork
def fork_and_end():
    pid = fork()
    if pid:
        signal.raise_signal(signal.SIGTERM)
    return pid
os.fork = fork_and_end
"""


class Driver:
    """A started program."""

    def __init__(self, drive: str, before: str = "") -> None:
        program = PROGRAM.replace("DRIVE", drive).replace("BEFORE", before)
        self.process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.output = self.process.stdout
        self.folder = Path(self.output.readline().split()[1])

    def wait_until_up(self) -> None:
        assert self.output.readline() == "up\n"

    def remove_folder(self) -> None:
        (self.folder / "ray").unlink()
        self.folder.rmdir()

    def end(self) -> list[str]:
        """Exit code and lines."""
        with self.output:
            lines = self.output.read().splitlines()
        code = self.process.wait(DEADLINE_S)
        return [str(code), *lines]


def test_its_own_end_is_that_of_the_command():
    driver = Driver("return 3")
    assert driver.end() == ["3", "3 ", "3 "]  # both processes return, the driver first
    assert not driver.folder.exists()


def test_an_end_by_ray_has_a_line():
    driver = Driver("driver.joined(); os._exit(1)")
    code, line = driver.end()
    driver.remove_folder()  # servers that drain need it
    assert code == "1"
    assert line.startswith("1 the connection to Ray has ended, and with it the fleet: Ray's head")


def test_a_signal_before_ray_answers_ends_it_at_once():
    driver = Driver(STUCK)
    driver.wait_until_up()
    driver.process.terminate()
    assert driver.end() == ["143", "143 stopped at once by SIGTERM; Ray did not answer"]
    assert not driver.folder.exists()


def test_a_signal_right_after_the_fork_ends_it_at_once():
    driver = Driver(STUCK, SIGNAL_AFTER_FORK)
    assert driver.end()[0] == "143"  # it may have come before the first line


def test_signals_do_not_interrupt_the_driver_and_reach_it_when_it_asks():
    driver = Driver(
        'driver.joined(); say("up"); select.select([driver], [], []); say(driver.signals()); return 0'
    )
    driver.wait_until_up()
    driver.process.send_signal(signal.SIGINT)
    assert driver.end() == ["0", "[<Signals.SIGINT: 2>]", "0 ", "0 "]


def test_a_driver_that_is_stuck_is_killed_some_seconds_after_a_second_signal():
    driver = Driver(f"driver.joined(); {STUCK}")
    driver.wait_until_up()
    driver.process.terminate()
    driver.process.send_signal(signal.SIGINT)
    code, line = driver.end()
    driver.remove_folder()
    assert (code, line[:21]) in {("130", "130 stopped at once b"), ("143", "143 stopped at once b")}


def test_a_driver_that_is_stuck_in_its_exit_is_killed_as_well():
    driver = Driver('import atexit; atexit.register(lambda: (say("up"), time.sleep(1000))); return 0')
    assert driver.output.readline() == "0 \n"
    driver.wait_until_up()
    driver.process.terminate()
    driver.process.send_signal(signal.SIGINT)
    code, line = driver.end()
    assert (code, line[:21]) in {("130", "130 stopped at once b"), ("143", "143 stopped at once b")}
    assert not driver.folder.exists()


def test_it_ends_with_its_parent():
    driver = Driver(STUCK)
    driver.wait_until_up()
    driver.process.kill()
    with driver.output:
        assert driver.output.read() == ""  # no process has the other end any more
    driver.process.wait(DEADLINE_S)
    driver.remove_folder()
