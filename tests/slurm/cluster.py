"""A Slurm of one node on this machine, for tests: munged, slurmctld and slurmd, two GPUs that exist only in its books.

    python tests/slurm/cluster.py start FOLDER     # prints what to export
    python tests/slurm/cluster.py stop FOLDER

All its files lie in FOLDER but two links in /etc/slurm, where steps of a job look for the configuration. It starts only as
root, where Slurm is installed and /etc/slurm holds no configuration; `stop` takes away what `start` put there. No accounting:
memory limits are booked, not enforced; time limits are enforced.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ETC = Path("/etc/slurm")
LINKED = ("slurm.conf", "gres.conf")
MARK = "farstate-slurm"
"""In the name of every folder of ours, so that a link that a killed test left behind is known as ours."""
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
GPUS = ("/dev/null", "/dev/zero")  # two different character devices; nobody opens them
_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
_PIDS = ("slurmd.pid", "slurmctld.pid", "munge/pid")

CONFIGURATION = """\
ClusterName=farstate
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
SlurmctldPort={controller_port}
SlurmdPort={node_port}
StateSaveLocation={folder}/controller
SlurmdSpoolDir={folder}/node
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_min_interval=100000,batch_sched_delay=0,sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MinJobAge=3600
InactiveLimit=0
KillWait={kill_wait}
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} RealMemory={memory} Gres=gpu:{gpus} Features=fast State=UNKNOWN
PartitionName=cpu Nodes={host} Default=YES MaxTime=INFINITE State=UP
PartitionName=gpu Nodes={host} MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Why no Slurm can be started here, or None."""
    if os.geteuid() != 0:
        return "Slurm's daemons need root"
    if missing := [name for name in NEEDED if shutil.which(name, path=_PATH) is None]:
        return f"{missing[0]} is not installed (Debian: apt-get install slurm-wlm munge)"
    for name in LINKED:
        link = ETC / name
        if not os.path.lexists(link):
            continue
        if not _ours(link):
            return f"{link} exists: a cluster's configuration is never replaced"
        if any(_alive(_pid(Path(os.readlink(link)).parent / pid)) for pid in _PIDS):
            return f"a Slurm of these tests runs already ({os.readlink(link)})"
    return None


def start(folder: Path, *, cores: int | None = None, kill_wait: int = 5) -> dict[str, str]:
    """Start the cluster; returns the environment variables that its commands need.

    Args:
        folder: new; its name contains MARK.
        cores: that the node claims to have; default: this machine's.
        kill_wait: seconds between SIGTERM and SIGKILL.

    Raises:
        RuntimeError: it cannot be started here, or the node did not become idle.
    """
    folder = folder.resolve()
    if MARK not in folder.name:
        raise RuntimeError(f"{folder}: the folder's name must contain '{MARK}'")
    if reason := why_not():
        raise RuntimeError(reason)
    for name in ("munge", "controller", "node"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "munge").chmod(0o700)
    key = folder / "munge/key"
    key.touch(0o600)
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    host = socket.gethostname().split(".")[0]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20 - 256
    controller_port, node_port = _free_ports(2)
    (folder / "slurm.conf").write_text(
        CONFIGURATION.format(
            folder=folder, host=host, memory=memory, cores=cores or os.cpu_count(), gpus=len(GPUS), kill_wait=kill_wait,
            controller_port=controller_port, node_port=node_port,
        )
    )  # fmt: skip
    (folder / "gres.conf").write_text(f"NodeName={host} Name=gpu File={','.join(GPUS)}\n")
    created = not ETC.exists()
    ETC.mkdir(exist_ok=True)
    if created:
        (folder / "created_etc").touch()
    for name in LINKED:
        (ETC / name).unlink(missing_ok=True)
        (ETC / name).symlink_to(folder / name)
    environment = {"SLURM_CONF": str(folder / "slurm.conf")}
    munge = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    try:
        _daemon(["munged", "--force", *(f"--{option}={folder}/munge/{name}" for option, name in munge.items())], environment)
        for daemon in ("slurmctld", "slurmd"):
            _daemon([daemon, "-c", "-f", str(folder / "slurm.conf")], environment)
        _wait_until_idle(environment)
    except BaseException:
        stop(folder)
        raise
    return environment


def stop(folder: Path) -> None:
    """End all jobs and daemons of the cluster in `folder`, and remove its links."""
    folder = folder.resolve()
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": _PATH}
    try:
        subprocess.run(["scancel", "--user=root"], env=environment, capture_output=True, timeout=20, check=False)
        jobs = ["squeue", "--noheader", "--states=running,completing"]
        _until(lambda: not subprocess.run(jobs, env=environment, capture_output=True, timeout=20, check=False).stdout.strip(), 15)
    except (OSError, subprocess.TimeoutExpired):
        pass  # the controller never came up: there are no jobs
    for name in _PIDS:
        pid = _pid(folder / name)
        for number, seconds in ((signal.SIGTERM, 10), (signal.SIGKILL, 5)):
            if pid is not None and _alive(pid):
                os.kill(pid, number)
                _until(lambda pid=pid: not _alive(pid), seconds)  # type: ignore[misc]
    for name in LINKED:
        if os.path.islink(ETC / name) and Path(os.readlink(ETC / name)).parent == folder:
            (ETC / name).unlink()
    if (folder / "created_etc").exists() and not any(ETC.iterdir()):
        ETC.rmdir()


def _ours(link: Path) -> bool:
    return link.is_symlink() and MARK in Path(os.readlink(link)).parent.name


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _daemon(command: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(
        command, env={**os.environ, **environment, "PATH": _PATH}, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30,
        check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} did not start: {(done.stderr or done.stdout).strip()}")


def _wait_until_idle(environment: dict[str, str]) -> None:
    def idle() -> bool:
        done = subprocess.run(
            ["sinfo", "--noheader", "--format=%T"], env={**os.environ, **environment}, capture_output=True, text=True, check=False
        )
        return "idle" in done.stdout.split()

    if not _until(idle, 20):
        raise RuntimeError(f"the node did not become idle; see slurmctld.log and slurmd.log beside {environment['SLURM_CONF']}")


def _until(condition, seconds: float) -> bool:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return bool(condition())


def _pid(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _alive(pid: int | None) -> bool:
    """Whether a process runs; one that ended and that nobody has waited for does not."""
    try:
        return pid is not None and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("start", "stop"))
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    if given.command == "stop":
        stop(given.folder)
        return
    try:
        for name, value in start(given.folder).items():
            print(f"export {name}={value}")
    except RuntimeError as error:
        sys.exit(f"cluster.py: {error}")


if __name__ == "__main__":
    main()
