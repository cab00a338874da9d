"""What a program can reach: nothing but its input, shared libraries and Python."""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.lmeval_tasks.sandbox.method import Method
from kvpolicy.lmeval_tasks.sandbox.outcome import Status
from kvpolicy.lmeval_tasks.sandbox.view import interpreter, packages
from tests.lmeval_tasks.sandbox.runs import watched


def told(method: Method, program: str, stdin: str = "") -> Any:
    """What the program prints, as JSON."""
    outcome = watched(method, program, stdin=stdin).outcome
    assert outcome.status is Status.FINISHED, outcome
    return json.loads(outcome.stdout)


def test_it_is_nobody_and_sees_no_other_process(method: Method) -> None:
    facts = told(method, "import os, json; print(json.dumps([os.getuid(), os.getgid(), os.getgroups(), os.getppid()]))")
    uid, gid, groups, parent = facts
    assert (uid, gid, parent) == (65534, 65534, 1)
    assert set(groups) <= {65534}
    assert told(method, "import os, json; print(json.dumps(os.path.exists('/proc/1')))") is False


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may take groups")
def test_it_has_none_of_a_roots_groups(method: Method) -> None:
    before = os.getgroups()
    os.setgroups([0, 4, 100])
    try:
        assert told(method, "import os, json; print(json.dumps(os.getgroups()))") == []
    finally:
        os.setgroups(before)


def test_it_has_no_capabilities(method: Method) -> None:
    program = """
import ctypes, json, os
libc = ctypes.CDLL(None, use_errno=True)
header = (ctypes.c_uint32 * 2)(0x20080522, 0)
data = (ctypes.c_uint32 * 6)()
assert libc.capget(header, data) == 0
no_new_privileges = libc.prctl(39, 0, 0, 0, 0)
print(json.dumps([*data, no_new_privileges]))
"""
    effective, permitted, _, effective_high, permitted_high, _, no_new_privileges = told(method, program)
    assert effective == permitted == effective_high == permitted_high == 0
    assert no_new_privileges == 1


def test_it_cannot_kill_or_trace_its_supervisor(method: Method) -> None:
    program = f"""
import ctypes, json, os
libc = ctypes.CDLL(None, use_errno=True)
results = []
for pid in (1, os.getppid(), -1, {os.getpid()}):
    try:
        os.kill(pid, 9)
        results.append("sent")  # the kernel lets nobody inside kill process 1
    except OSError as error:
        results.append(error.strerror)
results.append(libc.ptrace(16, 1, 0, 0))
print(json.dumps(results))
"""
    assert told(method, program)[2:] == ["No such process", "No such process", -1]


def test_it_reaches_no_network(method: Method) -> None:
    reached = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        threading.Thread(target=lambda: (server.accept(), reached.set()), daemon=True).start()
        program = f"""
import json, socket
failures = []
for address in (("127.0.0.1", {port}), ("192.0.2.1", 80)):
    try:
        socket.create_connection(address, timeout=2)
    except OSError as error:
        failures.append(type(error).__name__)
print(json.dumps([failures, [name for _, name in socket.if_nameindex()]]))
"""
        failures, interfaces = told(method, program)
        assert len(failures) == 2
        assert interfaces == ["lo"]
        assert not reached.is_set()
        socket.create_connection(("127.0.0.1", port), timeout=2).close()
        assert reached.wait(5), "the server would have answered"


def test_it_cannot_read_what_is_outside(method: Method, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tests = tmp_path / "livecodebench_v6.jsonl"
    tests.write_text("expected")
    tests.chmod(0o644)
    monkeypatch.setenv("KVPOLICY_DATA", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "secret")
    root = Path(__file__).resolve().parents[3]  # a folder of that name is there, if the interpreter lies below it
    places = [str(tests), __file__, str(root / "README.md"), "/etc/passwd", "/proc/self/environ"]
    places.append(f"/proc/{os.getpid()}/fd")
    assert all(map(os.path.exists, places))
    program = f"""
import json, os
found = [place for place in {places!r} if os.path.exists(place)]
above = os.listdir("/..") == os.listdir("/")  # the old root could still lie there
print(json.dumps([found, sorted(os.environ), os.listdir("."), os.listdir("/tmp"), above]))
"""
    found, environment, here, temporary, above = told(method, program)
    assert above
    assert found == []
    assert here == temporary == []
    assert not {"HF_TOKEN", "KVPOLICY_DATA"} & set(environment)
    assert set(environment) <= {
        *("HOME", "LC_CTYPE", "PATH", "PWD", "TMPDIR", "PYTHONHASHSEED", "PYTHONPATH", "PYTHONUTF8"),
        *("MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"),
    }


def test_the_root_holds_libraries_and_python_alone(method: Method) -> None:
    """Folders that lead to Python are there; beside Python there is nothing in them."""
    program = """
import json, os
def below(folder):
    inside = os.listdir(folder) if os.path.isdir(folder) and not os.path.islink(folder) else []
    return {name: below(os.path.join(folder, name)) for name in inside if name not in ("lib", "lib64", "lib32")}
print(json.dumps({name: below("/" + name) for name in os.listdir("/")}))
"""
    tree = told(method, program)
    assert set(tree.pop("dev")) <= {"full", "null", "random", "urandom", "zero"}
    assert tree.pop("tmp") == {}
    assert set(tree.pop("etc", {})) <= {"ld.so.cache"}
    assert set(tree["usr"].pop("share", {})) <= {"zoneinfo"}
    allowed = [
        "/usr/local",
        "/lib",
        "/lib32",
        "/lib64",
        interpreter(),
        *(str(Path(path).parent) for path in packages()),
    ]
    for path in paths(tree):
        assert any(f"{place}/".startswith(f"{path}/") for place in allowed), path


def paths(tree: dict[str, Any], above: str = "") -> Iterator[str]:
    for name, below in tree.items():
        yield f"{above}/{name}"
        yield from paths(below, f"{above}/{name}")


def test_it_holds_no_files_of_the_caller(method: Method) -> None:
    program = """
import json, os
def is_open(number):
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
print(json.dumps([number for number in range(3, 256) if is_open(number)]))
"""
    with tempfile.TemporaryFile() as file:
        os.set_inheritable(file.fileno(), True)
        assert told(method, program) == []


def test_it_can_write_to_its_own_folder_alone(method: Method, tmp_path: Path) -> None:
    name = f"written-by-{tmp_path.name}-{os.getpid()}"
    places = ["/", "/dev", "/dev/shm", "/etc", "/usr/lib", sys.base_prefix, str(tmp_path), str(Path.home()), "/tmp"]
    program = f"""
import json, os
written = []
for folder in {places!r}:
    try:
        with open(os.path.join(folder, {name!r}), "w") as file:
            file.write("x")
        written.append(folder)
    except OSError:
        pass
print(json.dumps(written))
"""
    assert told(method, program) == ["/tmp"]
    assert not [place for place in places if Path(place, name).exists()]
    assert told(method, "import json, os; print(json.dumps(os.listdir('/tmp')))") == []


def test_all_but_its_own_folder_is_mounted_read_only(method: Method) -> None:
    program = """
import json, os, sys
places = ["/", "/usr/lib", os.path.dirname(os.__file__), *sys.path, "/dev", "/tmp"]
print(json.dumps({place: bool(os.statvfs(place).f_flag & os.ST_RDONLY) for place in places if os.path.exists(place)}))
"""
    read_only = told(method, program)
    assert read_only.pop("/tmp") is False
    assert all(read_only.values()), read_only
    assert len(read_only) >= 4


def test_a_namespace_of_its_own_opens_nothing(method: Method) -> None:
    """With a user namespace the program gets capabilities in it; the view is locked all the same."""
    program = """
import ctypes, json, os
libc = ctypes.CDLL(None, use_errno=True)
libc.unshare(0x10000000 | 0x20000)
remounted = [libc.mount(b"none", place, None, 0x1000 | 32, None) for place in (b"/", b"/usr/lib")]
removed = libc.umount2(b"/usr/lib", 2)
print(json.dumps([*remounted, removed, os.path.exists("/proc"), os.listdir("/tmp")]))
"""
    assert told(method, program) == [-1, -1, -1, False, []]


def test_packages_can_be_imported(method: Method) -> None:
    pytest.importorskip("numpy")
    assert told(method, "import numpy; print(numpy.arange(4).sum())") == 6
