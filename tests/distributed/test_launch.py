"""The launcher's output: that of the run passes, and its own words become one line."""

from __future__ import annotations

import argparse
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from barellm.distributed import dispatch, heartbeat, launch, launcher_protocol, launchers, supervisor
from barellm.errors import UserError
from barellm.training import stopping

BANNER = """
===================================================================================
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 4711 RUNNING AT node7
=   EXIT CODE: 9
=   CLEANING UP REMAINING PROCESSES
=   YOU CAN IGNORE THE BELOW CLEANUP MESSAGES
===================================================================================
YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)
This typically refers to a problem with your application.
Please see the FAQ page for debugging suggestions
"""
RUN = "step 1\n\n====\n= a table\nstep 2\n"


def send(number: signal.Signals, seconds: float) -> None:
    """Send a signal to this process `seconds` after something has begun to listen to it. Before that it would end the tests."""
    before = signal.getsignal(number)

    def later() -> None:
        while signal.getsignal(number) == before:
            time.sleep(0.01)
        time.sleep(seconds)
        os.kill(os.getpid(), number)

    threading.Thread(target=later, daemon=True).start()


def passed(monkeypatch, output: str) -> tuple[str, tuple[str, dict[int, int], int | None]]:
    """(what the user sees, what the launcher has said, with the ranks of processes, and the status that was told)"""
    seen = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(buffer=seen))
    process = SimpleNamespace(stdout=io.BytesIO(output.encode()))
    numbers: dict[int, int] = {}
    said, told = launch._pass_on(process, numbers)
    return seen.getvalue().decode(), (said, numbers, told)


def test_the_output_of_a_run_passes_as_it_is(monkeypatch):
    assert passed(monkeypatch, RUN) == (RUN, ("", {}, None))


def test_the_launchers_own_words_do_not(monkeypatch):
    signed = "\x1ebarellm rank 3 4711\n\x1ebarellm rank 0 4708\n"
    seen, said = passed(monkeypatch, f"{signed}{RUN}[mpiexec@node7] Sending Ctrl-C to processes as requested\n{BANNER}")
    assert seen == RUN
    words = "rank 3 (process 4711) was ended by SIGKILL: the run is ended; resume from its last checkpoint with --resume"
    assert said[1] == {4711: 3, 4708: 0}
    assert launch._killed(*said[:2]) == words


def test_a_rank_tells_its_number_to_our_launcher_only(monkeypatch, capfd):
    monkeypatch.delenv("BARELLM_RANKS", raising=False)
    launcher_protocol.announce_rank(2)
    assert capfd.readouterr().out == ""
    monkeypatch.setenv("BARELLM_RANKS", "1")
    launcher_protocol.announce_rank(2)
    assert passed(monkeypatch, capfd.readouterr().out) == ("", ("", {os.getpid(): 2}, None))


def test_a_rank_that_did_not_sign_in_has_no_number(monkeypatch):
    _, said = passed(monkeypatch, BANNER)
    assert launch._killed(*said[:2]).startswith("a rank was ended by SIGKILL")
    assert launch._killed("YOUR APPLICATION TERMINATED: x (signal 999)", {}).startswith("a rank was ended by signal 999")
    assert launch._killed("", {}) == ""


def test_a_reader_that_goes_away_ends_the_run(monkeypatch):
    class Closed(io.BytesIO):
        def writelines(self, lines):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", SimpleNamespace(buffer=Closed()))
    signals: list[int] = []
    process = SimpleNamespace(stdout=io.BytesIO(RUN.encode()), send_signal=signals.append)
    assert launch._pass_on(process, {}) == ("", None) and signals == [15]


@pytest.mark.parametrize("count", [0, -1, 1 << 17])
def test_the_number_of_ranks_has_bounds(count):
    with pytest.raises(UserError, match=f"^--ranks is {count}, expected 1 to 65536$"):
        launch.start(count, ["train"])


def test_without_an_mpi_a_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(
        UserError, match=r"^several processes need an MPI with mpiexec, and there is none: pip install 'barellm\[mpi\]'$"
    ):
        launch.mpiexec()


def test_torchruns_first_process_starts_all_and_the_others_none(tmp_path):
    """With a launcher that tells what it is asked."""
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    (tmp_path / "mpiexec").write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit\nprintf "%s " "$@"\necho "${RANK-no}" "${WORLD_SIZE-no}"\nexit 7\n'
    )
    (tmp_path / "mpiexec").chmod(0o755)
    script = f"import sys; sys.executable = {str(python)!r}; from barellm.cli.main import main; sys.exit(main(sys.argv[1:]))"
    torch = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for rank, status, said in (("0", 7, f"-n 2 {python} -m barellm train default --lr 1 no no\n"), ("1", 0, "")):
        done = subprocess.run(
            [sys.executable, "-c", script, "train", "default", "--lr", "1"],
            env={"PYTHONPATH": ":".join(sys.path), "RANK": rank, **torch},
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stdout) == (status, said), done.stderr


@pytest.mark.parametrize("rank, said", [(0, "barellm: interrupted\n"), (1, "")])
def test_one_rank_speaks_of_ctrl_c_before_mpi_has_started(rank, said):
    script = """
import barellm.distributed.mpi as mpi
from barellm.distributed.dispatch import run_as_rank
def interrupted():
    raise KeyboardInterrupt
mpi.MpiRanks = interrupted
run_as_rank(None, 2, None)
"""
    own = os.environ | {"PYTHONPATH": ":".join(sys.path), "PMI_RANK": str(rank)}
    done = subprocess.run([sys.executable, "-c", script], env=own, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, said)


@pytest.fixture
def launcher(tmp_path, monkeypatch):
    """A function that puts a script in the place of mpiexec."""

    def put(script: str) -> None:
        (tmp_path / "mpiexec").write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit\n{script}\n')
        (tmp_path / "mpiexec").chmod(0o755)
        monkeypatch.setattr(launch, "mpiexec", lambda: str(tmp_path / "mpiexec"))

    return put


def test_a_run_that_lost_a_rank_fails_in_one_line(launcher, tmp_path, capfd):
    (tmp_path / "banner").write_text("\x1ebarellm rank 2 4711\n" + BANNER)
    launcher(f"cat {tmp_path / 'banner'}; exit 9")
    assert launch.start(3, ["train"]) == 1
    out, error = capfd.readouterr()
    assert out == "" and re.fullmatch(r"barellm: error: rank 2 \(process 4711\) was ended by SIGKILL: .*\n", error)


@pytest.mark.parametrize(
    "first, said",
    [
        ((4708, None), "rank 0 (process 4708) was ended by SIGKILL: "),
        ((4708, 6), "rank 0 (process 4708) was ended by SIGABRT: "),
        ((99, 0), "a rank was ended by SIGKILL: "),
    ],
)
def test_what_the_guard_has_seen_counts_more_than_the_launchers_words(first, said):
    assert launch._killed(BANNER, {4711: 3, 4708: 0}, first).startswith(said)


def test_what_the_guard_has_seen_needs_no_words_of_the_launcher():
    assert launch._killed("", {4708: 0}, (4708, 9)).startswith("rank 0 (process 4708) was ended by SIGKILL: ")
    assert launch._killed("", {4708: 0}, (4708, None)) == launch._killed("", {4708: 0}, (4708, 0)) == ""


@pytest.mark.skipif(sys.platform != "linux", reason="needs files for processes")
@pytest.mark.parametrize(
    "version, leave",
    [
        ("HYDRA build details:", "-disable-auto-cleanup -n 2"),
        ("mpirun (Open MPI) 5.0", "--map-by :OVERSUBSCRIBE --bind-to none -n 2"),
        ("another", "-n 2"),
    ],
)
def test_each_launcher_is_asked_for_ranks_as_it_wants(tmp_path, monkeypatch, capfd, version, leave):
    monkeypatch.setattr(launchers.os, "geteuid", lambda: 1000)
    script = f'#!/bin/sh\n[ "$1" = --version ] && echo "{version}" && exit\nprintf "%s " "$@"\n'
    (tmp_path / "mpiexec").write_text(script)
    (tmp_path / "mpiexec").chmod(0o755)
    monkeypatch.setattr(launch, "mpiexec", lambda: str(tmp_path / "mpiexec"))
    assert launch.start(2, ["train"]) == 0
    assert capfd.readouterr().out.startswith(f"{leave} {sys.executable} ")


def test_a_rank_that_has_said_itself_why_it_ends_gives_the_status(launcher, monkeypatch, tmp_path, capfd):
    (tmp_path / "banner").write_text(BANNER)
    launcher(f"cat {tmp_path / 'banner'}; exit 9")
    end = launch.Supervisor.end
    for first, status in ((512, 2), (9, 1), (None, 1)):
        monkeypatch.setattr(launch.Supervisor, "end", lambda g, first=first: (end(g), setattr(g, "first", (4711, first))))
        assert launch.start(2, ["train"]) == status
        assert ("was ended by SIGKILL" in capfd.readouterr().err) == (status == 1)


@pytest.mark.parametrize(
    "number, signed, status, said",
    [
        (signal.SIGINT, "0", 130, "barellm: interrupted\n"),
        (signal.SIGTERM, "", 143, "barellm: interrupted\n"),
        (signal.SIGINT, "01", 7, ""),
        (signal.SIGHUP, "01", 8, ""),
    ],
)
def test_a_signal_is_for_the_ranks_once_all_can_answer_it(launcher, capfd, number, signed, status, said):
    """Before that one that still imports modules would say more than a line."""
    signs = "; ".join(f"printf '\\036barellm rank {rank} 100{rank}\\n'" for rank in signed) or ":"
    launcher(f"trap 'kill $!; exit 7' INT; trap 'kill $!; exit 8' TERM; {signs}; sleep 60 & while :; do wait; done")
    send(number, 0.3)
    assert launch.start(2, ["train"]) == status
    assert capfd.readouterr() == ("", said)


def test_the_status_of_a_run_is_that_of_its_launcher(launcher, capfd):
    launcher("exit 130")
    for count in (1, 2):
        assert launch.start(count, ["train"]) == 130 and capfd.readouterr().err == ""


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_a_rank_that_is_stopped_before_it_has_met_the_others_is_named(launcher, monkeypatch, capfd):
    """What the guard says counts, and not that the launcher then finds all ranks killed."""
    monkeypatch.setattr(supervisor, "LOOK_S", 0.05)
    monkeypatch.setenv("BARELLM_RANK_LIMIT", "1.1")
    launcher("PMI_RANK=0 sleep 60 & PMI_RANK=1 sh -c 'kill -STOP $$' & wait; printf 'BAD TERMINATION (signal 9)\\n'; exit 9")
    assert launch.start(2, ["train"]) == 1
    words = r"barellm: error: rank 1 \(process \d+\) has been stopped for 1 s: the run is ended\n"
    assert re.fullmatch(words, capfd.readouterr().err)


def test_what_happens_after_a_run_has_told_its_status_is_of_no_account(launcher, tmp_path, capfd):
    """MPI's launcher may still find a rank that does not end as it should."""
    (tmp_path / "out").write_text("step 2\n\x1ebarellm rank end 130\n" + BANNER)
    launcher(f"cat {tmp_path / 'out'}; exit 9")
    assert launch.start(2, ["train"]) == 130
    assert capfd.readouterr() == ("step 2\n", "")


@pytest.fixture
def direct(monkeypatch):
    """The launcher is one whose ranks get signals from us, as Open MPI's."""
    known = launchers.known
    monkeypatch.setattr(launch.launchers, "known", lambda program: replace(known(program), passes_signals=False))


def test_a_rank_that_its_launcher_ends_does_not_say_that_it_stops(launcher, direct, capfd):
    """Open MPI's launcher sends SIGTERM when a rank is lost, also to one that was stopped, which answered as to Ctrl-C."""
    stops = f"\\n{launch.STOPPING.decode()}; once more\\n"
    launcher(f"printf 'a\\n\\nb\\n\\n{stops}barellm: error: why\\n{stops}' >&2; exit 1")
    assert launch.start(2, ["train"]) == 1
    assert capfd.readouterr() == ("", "a\n\nb\nbarellm: error: why\n")


def test_a_rank_that_stops_for_a_signal_of_the_users_says_so(launcher, direct, tmp_path, capfd):
    stops = f"\\n{launch.STOPPING.decode()}\\n"
    (tmp_path / "rank").write_text(
        f"trap 'printf \"{stops}\" >&2; exit 143' TERM; printf '\\036barellm rank 0 %s\\n' $$; while :; do sleep 0.01; done"
    )
    launcher(f"sh {tmp_path / 'rank'}; exit 1")
    send(signal.SIGTERM, 0.5)
    launch.start(1, ["train"])
    assert capfd.readouterr().err == f"\n{launch.STOPPING.decode()}\n"


def test_the_words_of_a_rank_that_stops_are_known(capfd):
    with stopping.Stopping():
        signal.raise_signal(signal.SIGTERM)
    assert capfd.readouterr().err.splitlines()[1].encode().startswith(launch.STOPPING)


def test_the_status_is_told_to_our_launcher_only(monkeypatch, capfd):
    monkeypatch.delenv("BARELLM_RANKS", raising=False)
    launcher_protocol.announce_exit(130)
    assert capfd.readouterr().out == ""
    monkeypatch.setenv("BARELLM_RANKS", "1")
    launcher_protocol.announce_exit(130)
    launcher_protocol.announce_exit(1)
    assert passed(monkeypatch, capfd.readouterr().out) == ("", ("", {}, 130)), "the first counts"


def test_a_rank_that_has_said_why_is_ended_with_all_others(monkeypatch, capfd):
    """It is our launcher that ends them, when it has read the words: MPICH's, on a busy machine, ended the run without a word."""
    monkeypatch.setenv("BARELLM_RANKS", "1")
    with subprocess.Popen(["sleep", "60"]) as rank, subprocess.Popen(["sleep", "60"]) as other:
        launcher_protocol.say("barellm: error: a line\nand another: é")
        launcher_protocol.announce_exit(2)
        signed = f"\x1ebarellm rank 0 {rank.pid}\n\x1ebarellm rank 1 {other.pid}\n"
        written = capfd.readouterr()
        assert written.err == ""
        seen, (_, numbers, told) = passed(monkeypatch, signed + written.out)
        assert (seen, numbers, told) == ("", {rank.pid: 0, other.pid: 1}, 2)
        assert [process.wait(10) for process in (rank, other)] == [-signal.SIGKILL] * 2
    assert capfd.readouterr().err == "barellm: error: a line\nand another: é\n"
    monkeypatch.delenv("BARELLM_RANKS")
    launcher_protocol.say("barellm: error: a line")
    assert capfd.readouterr() == ("", "barellm: error: a line\n"), "under mpirun it speaks itself"


@pytest.mark.parametrize("status", [0, 130])
def test_a_run_that_came_to_its_end_is_not_killed(monkeypatch, status):
    """Also one that a signal has stopped: its ranks leave MPI, and end what they have started."""
    with subprocess.Popen(["sleep", "60"]) as rank:
        passed(monkeypatch, f"\x1ebarellm rank 0 {rank.pid}\n\x1ebarellm rank end {status}\n")
        assert rank.poll() is None
        rank.kill()


@pytest.mark.parametrize("ours, told", [(True, "\x1ebarellm rank end 1\n"), (False, "")])
def test_a_rank_that_ends_all_says_so(ours, told):
    """MPI's launcher kills the others, and would have one of them named besides."""
    script = """
import os
from types import SimpleNamespace
from barellm.distributed import heartbeat
heartbeat.OUR_LAUNCHER_S = 0.0
heartbeat.end_all(SimpleNamespace(Abort=lambda status: os.write(2, b"MPI's own words")), 1)
"""
    own = {"PYTHONPATH": ":".join(sys.path)} | ({"BARELLM_RANKS": "1"} if ours else {})
    done = subprocess.run([sys.executable, "-c", script], env=own, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (1, told, "")


# A parent with a second thread, and its child, which tells each SIGTERM and ends a while after the first.
FAMILY = """
import os, signal, subprocess, sys, threading, time
if len(sys.argv) == 1:
    threading.Thread(target=lambda: subprocess.run([sys.executable, __file__, "child"])).start()
    time.sleep(60)
from barellm.distributed import launch
told = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: (print("told", flush=True), told.set()))
launch.end_behind_parent()
print("ready", flush=True)
told.wait(20)
time.sleep(0.3)
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="no files for processes here")
def test_the_end_of_the_parent_is_told_once(tmp_path):
    (tmp_path / "family.py").write_text(FAMILY)
    own = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, str(tmp_path / "family.py")]
    with subprocess.Popen(command, env=own, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "ready\n"
        parent.kill()
        assert parent.stdout.read() == "told\n"  # and the child has ended


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_speaks_of_an_interrupt_before_another_ends_the_run(monkeypatch, capfd, rank):
    slept: list[float] = []

    def interrupted() -> None:
        raise KeyboardInterrupt

    def ended(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.delenv("BARELLM_RANKS", raising=False)
    monkeypatch.setenv("PMI_RANK", str(rank))
    monkeypatch.setattr("barellm.distributed.mpi.MpiRanks", interrupted)
    monkeypatch.setattr(dispatch.time, "sleep", slept.append)
    monkeypatch.setattr(dispatch.os, "_exit", ended)
    with pytest.raises(SystemExit, match=r"^130$"):
        dispatch.run_as_rank(argparse.Namespace(ranks=None), 2, lambda args, ranks: 0)
    assert (slept, capfd.readouterr().err) == (([], "barellm: interrupted\n") if rank == 0 else ([dispatch.AFTER_S], ""))


@pytest.mark.parametrize("ours", [False, True])
def test_what_a_rank_says_is_read_before_it_ends_all(monkeypatch, ours):
    """MPICH's launcher drops what it has not read by then: the only line of a run that failed was lost now and then."""
    happened: list[object] = []
    monkeypatch.setenv("BARELLM_RANKS", "1") if ours else monkeypatch.delenv("BARELLM_RANKS", raising=False)

    def ended(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(heartbeat.threading, "Event", lambda: SimpleNamespace(wait=happened.append))
    monkeypatch.setattr(heartbeat.threading, "Timer", lambda *how: SimpleNamespace(start=lambda: None))
    monkeypatch.setattr(heartbeat.os, "dup2", lambda *files: happened.append("silent"))
    monkeypatch.setattr(heartbeat.os, "_exit", ended)
    with pytest.raises(SystemExit, match=r"^1$"):
        heartbeat.end_all(SimpleNamespace(Abort=lambda status: happened.append("end")), 1)
    assert happened == [20.0 if ours else 0.25, "silent", "end"]


OPEN_MPI = (
    b"-" * 74
    + b"\nprterun noticed that process rank 1 with PID 4711 on node vm exited on\nsignal 9 (Killed).\n"
    + b"-" * 74
    + b"\n\0"
)
PROXY = b"[proxy:0@vm] main (pmip.c:183): demux engine error waiting for event\n[mpiexec@vm] control_cb: assert failed\n"


@pytest.mark.parametrize(
    "lines, passed, own",
    [
        (b"a\n" + PROXY + b"b\n", b"a\nb\n", PROXY),
        (OPEN_MPI + b"barellm: error: x\n", b"barellm: error: x\n", OPEN_MPI[:-1]),
        (OPEN_MPI + OPEN_MPI, b"", 2 * OPEN_MPI[:-1]),
        (OPEN_MPI[:80] + b"\nbarellm: error: x\nit goes on\n", b"barellm: error: x\n" + OPEN_MPI[:80] + b"\nit goes on\n", b""),
        (b"Traceback:\n  --- x ---\nno end", b"Traceback:\n  --- x ---\nno end", b""),
    ],
    ids=["MPICH", "Open MPI", "twice", "no banner", "neither"],
)
def test_what_a_launcher_says_on_stderr_is_kept_back(lines, passed, own):
    seen: list[bytes] = []
    found = launchers.pass_on_errors(lines.splitlines(keepends=True), seen.append)
    assert (b"".join(seen), found.encode()) == (passed, own)


def test_open_mpis_words_name_a_rank_too():
    words = "rank 1 (process 4711) was ended by SIGKILL: "
    assert launch._killed(OPEN_MPI.decode(), {4711: 1}).startswith(words)


def test_no_rank_is_named_where_one_may_have_ended_before_it_was_seen():
    assert launch._killed("", {4708: 0}, (4708, 9), 2).startswith("a rank was ended by SIGKILL")
    assert launch._killed("", {4708: 0, 4709: 1}, (4708, 9), 2).startswith("rank 0 (process 4708) was ended by SIGKILL")


@pytest.mark.parametrize("status, line, shown", [(3, "", True), (3, "why\n", False), (0, "", False)])
def test_a_launchers_words_are_shown_where_nobody_else_says_why(launcher, tmp_path, capfd, status, line, shown):
    """As where Open MPI finds no room for so many ranks."""
    banner = b"-" * 74 + b"\nThere are not enough slots\n" + b"-" * 74 + b"\n"
    (tmp_path / "words").write_bytes(line.encode() + banner)
    launcher(f"cat {tmp_path / 'words'} >&2; exit {status}")
    assert launch.start(2, ["train"]) == status
    assert capfd.readouterr().err == line + banner.decode() * shown


def test_signals_go_to_the_ranks_themselves_where_their_launcher_would_kill_them(launcher, direct, tmp_path, capfd):
    rank = "trap 'echo rank got it; exit 143' TERM; printf '\\036barellm rank %s %s\\n' $1 $$; while :; do sleep 0.01; done"
    (tmp_path / "rank").write_text(rank)
    start = "; ".join(f"sh {tmp_path / 'rank'} {number} & " for number in "01").replace("& ;", "&")
    launcher(f"trap 'echo launcher got it' TERM; {start} wait; wait; exit 1")
    send(signal.SIGTERM, 0.5)
    launch.start(2, ["train"])
    assert capfd.readouterr().out == "rank got it\nrank got it\n"
