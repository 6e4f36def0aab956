import os
import signal
import subprocess
import sys
import threading

import pytest

from flashmoe_jax.console import StopRequest, guarded
from flashmoe_jax.errors import BudgetError


def fail(error: BaseException):
    def body() -> int:
        raise error

    return body


@pytest.mark.parametrize(
    ("error", "status", "shown"),
    [
        (BudgetError("too\n  small"), 2, "error: too small\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (BrokenPipeError(), 141, ""),
    ],
)
def test_exit_codes(error: BaseException, status: int, shown: str, capsys: pytest.CaptureFixture):
    assert guarded(fail(error)) == status
    assert capsys.readouterr() == ("", shown)
    assert guarded(lambda: 7) == 7


def test_bugs_are_not_hidden():
    with pytest.raises(ZeroDivisionError):
        guarded(fail(ZeroDivisionError()))


def test_the_first_interrupt_asks_and_the_second_insists():
    before = signal.getsignal(signal.SIGINT)
    with StopRequest("stopping") as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.is_set
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_other_threads_leave_signals_alone():
    errors = []

    def body() -> None:
        try:
            with StopRequest("stopping") as stop:
                assert not stop.is_set
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert not errors


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_disk_behind_stdout_is_one_line():
    code = (
        "import sys\n"
        "from flashmoe_jax.console import guarded\n"
        "from flashmoe_jax.output import write\n"
        "sys.exit(guarded(lambda: write('x' * 10)))\n"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "error: stdout cannot be written: No space left on device; send it elsewhere\n"


def test_a_closed_pipe_is_quiet():
    code = (
        "import sys\n"
        "from flashmoe_jax.console import guarded\n"
        "from flashmoe_jax.output import write\n"
        "sys.exit(guarded(lambda: [write('x' * 100) for _ in range(100000)] and 0))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141
