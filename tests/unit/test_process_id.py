"""Whether the process that an identity names is alive, dead, or cannot be seen from here."""

import subprocess
import sys

import psutil
import pytest

from openenv_pipe.system import process_id
from openenv_pipe.system.process_id import ProcessId

NO_PID = 2**22 + 1  # above the largest that Linux gives
OLD_FORM = {"boot": None, "namespace": None, "started_ticks": None}


def this(**changes) -> ProcessId:
    return ProcessId.of_this_process().model_copy(update=changes)


@pytest.mark.parametrize("form", [{}, OLD_FORM])
def test_a_process_is_told_from_another_with_its_number(form):
    living = this(**form)
    assert living.alive and living.memory_bytes
    started = {"started_s": living.started_s - 100}
    if living.started_ticks is not None:
        started["started_ticks"] = living.started_ticks - 100
    assert not living.model_copy(update=started).alive
    assert not living.model_copy(update={"pid": NO_PID}).alive
    assert ProcessId.model_validate_json(living.model_dump_json()) == living


def test_what_an_older_version_has_stored_is_read():
    stored = this().model_dump(include={"host", "pid", "started_s"})
    assert ProcessId.model_validate(stored).alive
    assert not ProcessId.model_validate({**stored, "pid": NO_PID}).alive


def test_a_process_that_nobody_has_collected_is_dead():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        found = psutil.Process(child.pid)
        ticks = process_id._started_ticks(child.pid)
        its = this(pid=child.pid, started_s=found.create_time(), started_ticks=ticks)
        assert its.alive
        child.stdin.close()
        while found.status() != psutil.STATUS_ZOMBIE:
            pass
        assert not its.alive


@pytest.mark.parametrize("change", [{"host": "elsewhere"}, {"namespace": "pid:[1]"}])
def test_a_process_that_cannot_be_seen_from_here_counts_as_alive(change):
    """Such as one in a container that shares the hostname and /dev/shm."""
    unseen = this(pid=NO_PID, **change)
    assert unseen.alive
    assert unseen.memory_bytes is None
    assert this(**change).memory_bytes is None  # another process has its number here


@pytest.mark.skipif(process_id._this_boot() is None, reason="needs the /proc of Linux")
def test_a_process_of_an_earlier_boot_is_dead():
    assert not this(boot="an earlier one").alive
    assert not this(boot="an earlier one", namespace="pid:[1]").alive


@pytest.mark.skipif(process_id._this_boot() is None, reason="needs the /proc of Linux")
def test_a_process_stays_alive_when_the_clock_is_set(monkeypatch):
    before = this()
    boot_time = psutil._pslinux.boot_time
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: boot_time() + 5)
    assert before.alive
