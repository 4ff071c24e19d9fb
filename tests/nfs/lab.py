"""An NFS server and two kernel clients on one machine.

The clients are user-mode-linux guests, so their caches are those of a real NFS client; the server is nfs-ganesha.
The guests see this machine's files, read-only, and so its Python and this project.

Needs root and the Debian packages in `PACKAGES`. All of it lives in a network namespace of this process, and ends
with it.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGES = "user-mode-linux kmod nfs-common nfs-ganesha nfs-ganesha-vfs rpcbind iproute2"
PROGRAMS = ("linux.uml", "ganesha.nfsd", "rpcbind", "ip", "modprobe", "mount.nfs")
HERE = Path(__file__).resolve().parent
SERVER = "10.77.0.1"
CLONE_NEWNET = 0x40000000
MOUNTS = {
    "4.1": f"mount -t nfs4 -o vers=4.1,proto=tcp {SERVER}:/exp",
    "3": f"mount -t nfs -o vers=3,proto=tcp,nolock,mountport=20048 {SERVER}:EXPORT",
}
CONFIG = """
NFS_CORE_PARAM {{ Protocols = 3,4; NFS_Port = 2049; MNT_Port = 20048; Enable_UDP = None; Enable_NLM = false;
  Enable_RQUOTA = false; Bind_addr = {server}; Plugins_Dir = /usr/lib/x86_64-linux-gnu/ganesha; }}
NFSv4 {{ Graceless = true; Lease_Lifetime = 10; Grace_Period = 10; RecoveryBackend = fs; Minor_Versions = 0,1,2;
  Only_Numeric_Owners = true; }}
EXPORT {{ Export_Id = 1; Path = {export}; Pseudo = /exp; Access_Type = RW; Squash = No_root_squash; SecType = sys;
  Protocols = 3,4; Transports = TCP; FSAL {{ Name = VFS; }} }}
NFS_KRB5 {{ Active_krb5 = false; }}
LOG {{ Default_Log_Level = EVENT; }}
"""


@dataclass(frozen=True)
class Client:
    """One kernel NFS client.

    Attributes:
        ip: address in the laboratory.
    """

    ip: str

    def run(self, code: str, timeout_s: float = 60.0) -> Any:
        """Run Python there; what it leaves in `result`."""
        with socket.create_connection((self.ip, 7000), timeout=timeout_s) as connection:
            connection.sendall(json.dumps({"code": code}).encode() + b"\n")
            answer = json.loads(connection.makefile().readline())
        if answer["error"] is not None:
            raise RuntimeError(f"client {self.ip}: {answer['error']}")
        return answer["result"]

    def mount(self, version: str, export: Path) -> str:
        """Mount the export; the folder where it is."""
        where = f"/mnt/v{version}"
        command = f"mkdir -p {where}; {MOUNTS[version].replace('EXPORT', str(export))} {where}"
        self.run(
            "import os, subprocess\n"
            f"if not os.path.ismount({where!r}):\n"
            f"    done = subprocess.run({command!r}, shell=True, capture_output=True, text=True)\n"
            "    assert done.returncode == 0, done.stderr\n"
        )
        return where


@dataclass(frozen=True)
class Lab:
    """The server's folder and its clients."""

    export: Path
    clients: tuple[Client, Client]

    def fresh_folder(self, version: str) -> str:
        """A folder that no client has seen, as both of them will see it; it is on the server alone as yet."""
        name = uuid.uuid4().hex
        (where,) = {client.mount(version, self.export) for client in self.clients}
        (self.export / name).mkdir()
        return f"{where}/{name}"


def missing() -> str | None:
    """Why there can be no laboratory here."""
    if os.geteuid() != 0:
        return "needs root"
    if not os.path.exists("/dev/net/tun"):
        return "needs /dev/net/tun"
    absent = [
        name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None
    ]
    return f"{', '.join(absent)} not found: apt-get install {PACKAGES}" if absent else None


@contextmanager
def laboratory(folder: Path) -> Iterator[Lab]:
    """Bring all up; everything that was started is ended by its handle."""
    export = folder / "export"
    export.mkdir()
    _own_network()
    with ExitStack() as stack:
        stack.enter_context(_process(["rpcbind", "-f", "-w"], folder / "rpcbind.log"))
        config = folder / "ganesha.conf"
        config.write_text(CONFIG.format(server=SERVER, export=export))
        command = [
            "ganesha.nfsd",
            "-F",
            "-L",
            str(folder / "ganesha.log"),
            "-f",
            str(config),
            "-p",
            str(folder / "pid"),
        ]
        stack.enter_context(_process(command, folder / "ganesha.out"))
        _wait_for(SERVER, 2049, folder / "ganesha.log")
        for number in (1, 2):
            stack.enter_context(_guest(folder, number))
        clients = tuple(Client(f"10.77.0.1{number}") for number in (1, 2))
        for number, client in enumerate(clients, 1):
            _wait_for(client.ip, 7000, folder / f"guest-{number}.log")
        yield Lab(export, (clients[0], clients[1]))


def _own_network() -> None:
    """Leave the machine's network for one that holds a bridge and two taps."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "a network namespace of its own was refused")
    commands = [
        "link set lo up",
        "link add br0 type bridge",
        f"addr add {SERVER}/24 dev br0",
        "link set br0 up",
    ]
    for number in (1, 2):
        commands += [f"tuntap add tap{number} mode tap", f"link set tap{number} master br0 up"]
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True)


def _guest(folder: Path, number: int) -> Any:
    modules = folder / f"lab-{number}" / "modroot" / "lib" / "modules"
    modules.parent.mkdir(parents=True)
    modules.symlink_to("/usr/lib/uml/modules")
    words = {
        "IP": f"10.77.0.1{number}",
        "LAB": modules.parents[2],
        "AGENT": HERE / "agent.py",
        "PYTHON": sys.executable,
        "REPO": HERE.parent.parent,
    }
    command = [
        "linux.uml",
        f"mem={os.environ.get('UML_MEM', '512M')}",
        f"umid=g{number}",
        f"uml_dir={folder}",
    ]
    command += ["root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro", f"init={HERE / 'init.sh'}"]
    command += ["con=null", "con0=null,fd:1", f"vec0:transport=tap,ifname=tap{number},depth=128,gro=1"]
    command += [f"{name}={value}" for name, value in words.items()]
    return _process(command, folder / f"guest-{number}.log", TMPDIR="/dev/shm")


@contextmanager
def _process(command: list[str], log: Path, **environ: str) -> Iterator[None]:
    paths = {"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    with open(log, "wb") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | paths | environ,
            start_new_session=True,
        )
    try:
        yield
    finally:
        os.killpg(process.pid, 9)
        process.wait()


def _wait_for(host: str, port: int, log: Path, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host, port), timeout=2).close()
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"{host}:{port} did not answer in {timeout_s:.0f} s\n{log.read_text()[-3000:]}")
