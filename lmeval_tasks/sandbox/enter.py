"""Enter namespaces as bubblewrap would, where there is no bubblewrap.

Run as a script of the standard library alone: ``python -c SOURCE OPTION… -- COMMAND…``. It understands exactly the
options that ``isolation.py`` writes. Needs Linux 5.12 (``mount_setattr``). See unshare(2), user_namespaces(7),
pivot_root(2), mount_setattr(2).
"""

from __future__ import annotations

import ctypes
import os
import sys

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_RDONLY, _NOSUID, _NODEV, _BIND, _REC, _PRIVATE = 1, 2, 4, 0x1000, 0x4000, 0x40000
_DETACH = 2
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000  # the same number on every architecture
_SET_PDEATHSIG, _SET_NO_NEW_PRIVS, _SIGKILL = 1, 38, 9
# The new root is built over a folder that every system has and that nothing visible inside lies in.
_STAGE = "/sys"

_libc = ctypes.CDLL(None, use_errno=True)


class _Attributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]


def main(arguments: list[str]) -> int:
    """Run the command as process 1 of new namespaces; its exit code, or 128 plus the signal that ended it."""
    options, command = arguments[: (end := arguments.index("--"))], arguments[end + 1 :]
    user = "--unshare-user" in options
    _unshare(_NEWNS | _NEWUTS | _NEWIPC | _NEWPID | _NEWNET | (_NEWUSER if user else 0), options)
    child = os.fork()
    if child == 0:
        _check("prctl", _libc.prctl(_SET_PDEATHSIG, _SIGKILL, 0, 0, 0))
        _build(options)
        _check("prctl", _libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        # As a user other than 0 this gives up all capabilities; a privileged root changes its user later.
        os.execv(command[0], command)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code


def _unshare(flags: int, options: list[str]) -> None:
    outside = os.geteuid(), os.getegid()
    _check("unshare", _libc.unshare(flags))
    if flags & _NEWUSER:
        # Without this an unprivileged process may not map its group.
        _write("/proc/self/setgroups", "deny")
        for name, identity in zip(("uid", "gid"), outside, strict=True):
            inside = options[options.index(f"--{name}") + 1]
            _write(f"/proc/self/{name}_map", f"{inside} {identity} 1")


def _build(options: list[str]) -> None:
    """Carry out the options about files, in their order, and make the result the root."""
    _mount(None, "/", None, _REC | _PRIVATE, None)
    _mount("tmpfs", _STAGE, "tmpfs", _NOSUID | _NODEV, "mode=0755")
    os.chdir(_STAGE)
    os.umask(0o022)
    mode = size = ""
    rest = iter(options)
    for option in rest:
        if option == "--perms":
            mode = next(rest)
        elif option == "--size":
            size = next(rest)
        elif option == "--dir":
            os.mkdir(f".{next(rest)}", int(mode, 8))
        elif option in ("--ro-bind", "--dev-bind"):
            _bind(next(rest), f".{next(rest)}")
        elif option == "--symlink":
            os.symlink(next(rest), f".{next(rest)}")
        elif option == "--tmpfs":
            os.mkdir(place := f".{next(rest)}")
            _mount("tmpfs", place, "tmpfs", _NOSUID | _NODEV, f"mode={mode},size={size}")
        elif option == "--remount-ro":
            _protect(f".{next(rest)}", recursive=False)
        elif option == "--chdir":
            folder = next(rest)
    # The new root on top of the old one, which is then let go: pivot_root(2), "pivot_root(".", ".")".
    _check("pivot_root", _libc.pivot_root(b".", b"."))
    _check("umount2", _libc.umount2(b".", _DETACH))
    os.chdir(folder)


def _bind(source: str, place: str) -> None:
    """Show `source` at `place`, read-only; a device can still be written to."""
    if os.path.isdir(source):
        os.mkdir(place)
    else:
        os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o444))
    _mount(source, place, None, _BIND | _REC, None)
    _protect(place, recursive=True)


def _mount(source: str | None, place: str, kind: str | None, flags: int, data: str | None) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, place, kind, data)]
    _check(f"mount {source} at {place}", _libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]))


def _protect(place: str, *, recursive: bool) -> None:
    attributes = _Attributes(set=_RDONLY | _NOSUID)
    status = _libc.syscall(
        ctypes.c_long(_MOUNT_SETATTR),
        ctypes.c_int(_AT_FDCWD),
        ctypes.c_char_p(os.fsencode(place)),
        ctypes.c_uint(_AT_RECURSIVE if recursive else 0),
        ctypes.byref(attributes),
        ctypes.c_size_t(ctypes.sizeof(attributes)),
    )
    _check(f"mount_setattr {place}", status)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _check(what: str, status: int) -> None:
    if status != 0:
        code = ctypes.get_errno()
        raise SystemExit(f"{what}: {os.strerror(code)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
