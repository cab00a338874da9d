"""The command line of bubblewrap for a :class:`View`, which ``enter.py`` reads too where there is no bubblewrap."""

from __future__ import annotations

from itertools import chain
from pathlib import PurePath

from kvpolicy.lmeval_tasks.sandbox.view import View

NOBODY = 65534


def arguments(view: View, *, root: bool, tmp_bytes: int) -> list[str]:
    """Options of bubblewrap 0.7 or newer, up to the command.

    Own namespaces of processes, network, IPC and host name; a root folder that holds `view` alone and is read-only; a
    writable ``/tmp`` of `tmp_bytes`; no ``/proc``. The command becomes process 1: nothing inside can kill it, and the
    kernel ends everything inside when it ends. With `root` (one that may mount) the command keeps the right to
    change its user, and must; else a user namespace is made, in which it is nobody without capabilities.
    """
    namespaces = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    return [
        *namespaces,
        *(_keep_setuid() if root else ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]),
        *("--as-pid-1", "--die-with-parent"),
        # Bubblewrap would make the folders above readable to root alone.
        *chain.from_iterable(("--perms", "0755", "--dir", folder) for folder in _above(view)),
        *chain.from_iterable(("--ro-bind", path, path) for path in view.read_only),
        *chain.from_iterable(("--symlink", target, path) for target, path in view.links),
        *chain.from_iterable(("--dev-bind", path, path) for path in view.devices),
        *("--perms", "1777", "--size", str(tmp_bytes), "--tmpfs", "/tmp"),
        *("--remount-ro", "/", "--chdir", "/tmp", "--"),
    ]


def _above(view: View) -> list[str]:
    """The folders that paths of the view lie in, outer ones first, without the root."""
    paths = [*view.read_only, *view.devices, *(path for _, path in view.links)]
    return sorted({str(folder) for path in paths for folder in PurePath(path).parents} - {"/"})


def _keep_setuid() -> list[str]:
    return ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
