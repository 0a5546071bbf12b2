"""Processes of tests that are forked (preloaded.py) are what they would be if the interpreter had been started."""

from __future__ import annotations

import json
import os
import signal
import subprocess

import pytest
from preloaded import EXEC, PYTHON
from processes import ENVIRONMENT, processes_of, wait_for

pytestmark = pytest.mark.skipif(EXEC, reason="nothing is forked")
SHOW = """
import json, os, signal, sys
print(json.dumps([sys.argv, __name__, os.getcwd(), os.environ["RANK"], os.getppid(), os.getsid(0) == os.getpid(),
                  [signal.getsignal(number) == signal.SIG_DFL for number in (signal.SIGTERM, signal.SIGHUP)],
                  sorted(os.listdir("/proc/self/fd"), key=int)[:-1], sys.stdin.read(),
                  sorted(os.sched_getaffinity(0))]))
print("on stderr", file=sys.stderr)
sys.exit(5)
"""


@pytest.mark.parametrize("new_session", [True, False])
def test_a_forked_process_has_what_it_is_started_with(tmp_path, new_session):
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    done = subprocess.run(
        [PYTHON, "-c", SHOW, "one", "two words"],
        cwd=tmp_path,
        env={**ENVIRONMENT, "RANK": "3"},
        input="given",
        capture_output=True,
        text=True,
        start_new_session=new_session,
        timeout=60,
        check=False,
    )
    os.sched_setaffinity(0, cores)
    assert (done.returncode, done.stderr) == (5, "on stderr\n")
    arguments, files = ["-c", "one", "two words"], ["0", "1", "2"]
    seen = [arguments, "__main__", str(tmp_path), "3", os.getpid(), new_session]
    hung_up = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN  # which nohup ignores
    assert json.loads(done.stdout) == [*seen, [True, hung_up], files, "given", [min(cores)]]


ENDING = """
import atexit, sys, threading, time

atexit.register(print, "atexit")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
if sys.argv[1] == "daemon":
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print("main")
sys.exit({"number": 6, "text": "a reason"}.get(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("how", "code", "error"), [("nothing", 0, ""), ("number", 6, ""), ("text", 1, "a reason\n"), ("daemon", 0, "")]
)
def test_a_forked_process_ends_as_the_interpreter_does(how, code, error):
    done = subprocess.run([PYTHON, "-c", ENDING, how], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "main\nthread\natexit\n", error)


def test_a_forked_process_dies_of_signals_and_of_exceptions(tmp_path):
    waiting = "import sys, time; print('ready', flush=True); time.sleep(60)"
    for number, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, -signal.SIGTERM)):
        with subprocess.Popen([PYTHON, "-c", waiting, str(tmp_path)], stdout=subprocess.PIPE) as process:
            assert process.stdout.readline() == b"ready\n"
            assert processes_of(tmp_path) == {process.pid: ""}
            process.send_signal(number)
            assert process.wait(20) == code
    assert processes_of(tmp_path) == {}
    failed = subprocess.run([PYTHON, "-c", "1 / 0"], capture_output=True, text=True, timeout=60, check=False)
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"


NESTED = """
import os, subprocess, sys, time
inner = "import os, time; os.write(1, b'%d\\\\n' % os.getppid()); time.sleep(60)"
subprocess.Popen([sys.executable, "-c", inner, sys.argv[1]], env={**os.environ, "RANK": "1"})
os.write(1, b"%d\\n" % os.getpid())
time.sleep(60)
"""


def test_processes_of_a_forked_process_are_its_children_and_outlive_it(tmp_path):
    command = [PYTHON, "-c", NESTED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert [int(process.stdout.readline()) for _ in range(2)] == [process.pid] * 2
        found = processes_of(tmp_path)
        assert sorted(found.values()) == ["", "1"]
        process.kill()
        assert process.wait(20) == -signal.SIGKILL
        (left,) = processes_of(tmp_path)
        os.kill(left, signal.SIGKILL)
    assert wait_for(lambda: processes_of(tmp_path) == {}, 20)


def test_a_forked_process_need_not_import_torch():
    subprocess.run([PYTHON, "-c", "pass"], check=True, timeout=60)  # the server has started
    before = sum(os.times()[2:4])
    subprocess.run([PYTHON, "-c", "import torch, torch._dynamo, os; os._exit(0)"], check=True, timeout=60)
    assert sum(os.times()[2:4]) - before < 1.0
