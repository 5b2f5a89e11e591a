"""Becomes another program, bound to its parent's life and stripped of root.

Layer: service. Run as a script by `child.spawn`, with the standard library only; it never stays in memory.

    python -I -S shim.py PARENT_PID DEATH_SIGNAL USER|- REACH -- PROGRAM ARGUMENT…

Order matters. Credentials change first, because the kernel forgets the parent-death signal when they do; then
the signal is armed; then the parent is looked at once more, because it may have died before the signal was armed.

REACH is a colon-separated list of paths the program needs. When USER cannot reach them (a virtual environment
or a home below a private folder such as /root), CAP_DAC_OVERRIDE, and only that, is kept as an ambient capability:
the program then runs as USER, which is all PostgreSQL asks for, and still finds its files.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import sys
from typing import NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_KEEPCAPS = 8
PR_SET_SECUREBITS = 28
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_RAISE = 2
CAP_DAC_OVERRIDE = 1
CAP_SETPCAP = 8
SECBIT_NO_SETUID_FIXUP = 1 << 2
CAPABILITY_VERSION_3 = 0x20080522


def refuse(message: str) -> NoReturn:
    sys.stderr.write(f"tidegate: {message}\n")
    sys.exit(126)


def set_capabilities(libc: ctypes.CDLL, mask: int) -> bool:
    """Make `mask` (low 32 bits) the permitted, effective and inheritable set."""
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    data = (ctypes.c_uint32 * 6)(mask, mask, mask, 0, 0, 0)
    return bool(libc.capset(header, data) == 0)


def become(libc: ctypes.CDLL, user: str, reach: list[str]) -> None:
    account = pwd.getpwnam(user)
    libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(account.pw_gid, account.pw_gid, account.pw_gid)
    os.setresuid(account.pw_uid, account.pw_uid, account.pw_uid)
    # access() asks with the real user's rights and no capabilities: exactly "can USER reach it".
    hidden = [path for path in reach if not os.access(path, os.R_OK | os.X_OK)]
    if not hidden:
        set_capabilities(libc, 0)
        return
    # PostgreSQL asks access() itself before it runs a program of its own; the secure bit makes the kernel answer
    # with the capabilities we keep.
    kept = (
        set_capabilities(libc, 1 << CAP_DAC_OVERRIDE | 1 << CAP_SETPCAP)
        and libc.prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP, 0, 0, 0) == 0
        and set_capabilities(libc, 1 << CAP_DAC_OVERRIDE)
        and libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_DAC_OVERRIDE, 0, 0) == 0
    )
    if not kept:
        refuse(f"the user {user} cannot reach {hidden[0]}, and this machine does not let root grant it")


def main() -> NoReturn:
    parent, death_signal, user, reach = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    command = sys.argv[6:]
    libc = ctypes.CDLL(None, use_errno=True)
    if user != "-":
        become(libc, user, [path for path in reach.split(":") if path])
    libc.prctl(PR_SET_PDEATHSIG, death_signal, 0, 0, 0)
    if os.getppid() != parent:
        refuse("the supervisor died during start")
    try:
        os.execv(command[0], command)  # noqa: S606 - the caller's fixed argument list, no shell
    except OSError as error:
        refuse(f"cannot run {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
