"""The first process of a LocalEnvironment of Harbor's (harbor_local.py): it makes a root of its own from Linux
namespaces and stays there. With it the kernel ends every process in there; so does the end of its stdin.

Argument: JSON, {"root": directory, "shared": [more directories of the host]}. It prints, in any order, its
process id as the host has it, and `+`; or `-` and why there is no root.
"""

from __future__ import annotations

import codecs
import json
import os
import signal
import sys

from rltool.environments.sandbox_child import (
    CLONE_NEWIPC,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
    DEVICES,
    HOST,
    MACHINES,
    MNT_DETACH,
    MS_BIND,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    MS_REMOUNT,
    SYSTEM,
    bind,
    check,
    close,
    explained,
    libc,
    mount,
    read_mounts,
    within,
)

codecs.lookup("unicode_escape")  # read_mounts needs it when the interpreter's files are out of sight
CONFIGURED = ("/etc", "/opt")
"""Of the host too, read-only."""


def main() -> None:
    order = json.loads(sys.argv[1])
    try:
        init = enter()
        if init:
            write(str(init))
        else:
            build(order["root"], order["shared"])
    except OSError as error:
        write(f"-{explained(error)}")
        os._exit(1)
    if init:
        os.waitpid(init, 0)
        return
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies of what its programs leave behind
    write("+")
    while os.read(0, 1):
        pass
    os._exit(0)


def write(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def enter() -> int:
    """Returns in both: the process id of the first process of the namespaces, 0 in that one. There it is root."""
    uid, gid = os.geteuid(), os.getegid()
    apart = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS
    check(libc.unshare(apart), "namespaces (unshare)")
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return os.fork()


def build(root: str, shared: list[str]) -> None:
    for path in shared:
        os.scandir(path).close()  # OSError where it is no directory
    links = {path: os.readlink(path) for path in SYSTEM if os.path.islink(path)}
    system = [path for path in (*SYSTEM, *CONFIGURED, *shared) if path not in links and os.path.isdir(path)]
    mount("", "/", flags=MS_REC | MS_PRIVATE)
    mount(root, root, flags=MS_BIND | MS_REC)
    os.chdir(root)
    os.mkdir(HOST[1:])
    check(libc.syscall(MACHINES[os.uname().machine].pivot_root, b".", HOST[1:].encode()), "pivot_root")
    os.chdir("/")
    for path in system:
        bind(path, path)
    for path, target in links.items():
        os.symlink(target, path)
    for path in ("/proc", "/dev", "/tmp", "/root", "/home", "/run", "/var/tmp"):
        os.makedirs(path, exist_ok=True)
    mount("harbor", "/dev", "tmpfs", MS_NOSUID | MS_NOEXEC, "size=64m,mode=0755")
    for path in (*DEVICES, "/dev/zero", "/dev/tty"):
        bind(path, path)
    for path in ("/dev/pts", "/dev/shm"):
        os.mkdir(path)
    mount("harbor", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620")
    for path, target in (("/dev/ptmx", "pts/ptmx"), ("/dev/fd", "/proc/self/fd")):
        os.symlink(target, path)
    # Read-only: to the kernel's root /proc/sys is open without any capability.
    mount("proc", "/proc", "proc", MS_RDONLY | MS_NOSUID | MS_NOEXEC)
    close([(path, options) for path, options in read_mounts(f"{HOST}/proc/self/mountinfo") if within(path, system)])
    check(libc.umount2(HOST.encode(), MNT_DETACH), "umount of the host's files")
    os.rmdir(HOST)
    mount("", "/", flags=MS_REMOUNT | MS_BIND | MS_NOSUID)
    for path in ("/tmp", "/var/tmp", "/dev/shm"):
        os.chmod(path, 0o1777)


if __name__ == "__main__":
    main()
