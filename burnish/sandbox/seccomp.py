"""The filter of system calls of sandboxed programs, for ``bwrap --seccomp``.

It refuses (EPERM) what namespaces do not separate: the kernel's keyrings, which a sandbox would
share with the run and with other sandboxes, sockets to the host of a virtual machine (AF_VSOCK),
and interfaces of the kernel that no program of a policy needs and that have had many
vulnerabilities. System calls of another architecture (32 bits, x32) are refused, too.
"""

from __future__ import annotations

import platform
import struct
from typing import NamedTuple

from burnish.sandbox.base import SandboxError

_AF_VSOCK = 40
_ALLOW, _DENY = 0x7FFF0000, 0x00050000 | 1
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
"""Offsets in struct seccomp_data."""
_X32 = 0x40000000
_IO_URING = (425, 426, 427)


class _Calls(NamedTuple):
    """Numbers of one architecture."""

    audit: int
    """AUDIT_ARCH of the kernel."""
    socket: int
    refused: tuple[int, ...]
    """add_key, request_key, keyctl, perf_event_open, bpf, userfaultfd, io_uring."""


_CALLS = {
    "x86_64": _Calls(0xC000003E, 41, (248, 249, 250, 298, 321, 323, *_IO_URING)),
    "aarch64": _Calls(0xC00000B7, 198, (217, 218, 219, 241, 280, 282, *_IO_URING)),
}


def seccomp_filter() -> bytes:
    """Return the filter as a program of classic BPF. Raises SandboxError for an architecture whose
    system calls are not known here."""
    calls = _CALLS.get(platform.machine())
    if calls is None:
        raise SandboxError(
            f"the sandbox knows the system calls of {', '.join(_CALLS)}, and this machine is "
            f"{platform.machine()}; use {{kind: unsafe_subprocess}}, which isolates nothing, or "
            "another machine"
        )
    number = len(calls.refused)
    deny = 9 + number  # index of the last instruction
    lines = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 0, deny - 2, calls.audit),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, deny - 4, 0, _X32),
        *((_EQUAL, deny - 5 - i, 0, call) for i, call in enumerate(calls.refused)),
        (_EQUAL, 1, 0, calls.socket),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_EQUAL, 1, 0, _AF_VSOCK),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _DENY),
    ]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)
