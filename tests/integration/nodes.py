"""Two machines in one: network namespaces joined by a cable, and commands that run in them.

Needs `ip` (iproute2) beside util-linux. A namespace lives as long as a process in it, so that nothing is left behind
however a test ends: the process that holds one open waits for the end of its standard input, which is ours.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import psutil

ADDRESSES = ("10.77.0.1", "10.77.0.2")
INTERFACE = "eth0"


class NotPermitted(Exception):
    """This user may not make network namespaces here."""


class Node:
    """One network namespace, empty but for its loopback, which is down."""

    def __init__(self, stack: ExitStack, make: list[str], *, own_user: bool) -> None:
        hold = [*make, "sh", "-c", "echo made; exec cat"]
        pipe = subprocess.PIPE
        self._holder = stack.enter_context(subprocess.Popen(hold, stdin=pipe, stdout=pipe, stderr=pipe, text=True))
        assert self._holder.stdout and self._holder.stderr
        if self._holder.stdout.readline() != "made\n":
            raise NotPermitted(f"network namespaces: {self._holder.stderr.read().strip()}")
        self.pid = self._holder.pid
        self._user = ["--user", "--preserve-credentials"] if own_user else []

    def inside(self, *command: str, network: bool = True) -> list[str]:
        """`command` in this node's network, or only as the user who may change it."""
        if not network and not self._user:
            return list(command)
        where = [*self._user, *(["--net"] if network else [])]
        return ["nsenter", "--target", str(self.pid), *where, *command]

    def processes(self) -> list[psutil.Process]:
        """Every process in this node's network, but for the one that holds it open."""
        network, found = os.stat(f"/proc/{self.pid}/ns/net").st_ino, []
        for process in psutil.process_iter():
            # Others end meanwhile, or belong to other users.
            with suppress(OSError):
                if process.pid != self.pid and os.stat(f"/proc/{process.pid}/ns/net").st_ino == network:
                    found.append(process)
        return found

    def run(self, *command: str) -> None:
        """Runs `command` here, and raises with its error output when it fails."""
        outcome = subprocess.run(self.inside(*command), capture_output=True, text=True)
        assert outcome.returncode == 0, f"{' '.join(command)}: {outcome.stderr}"


def kill(processes: list[psutil.Process]) -> None:
    """SIGKILL to each that is still there."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


@contextmanager
def two_nodes() -> Iterator[tuple[Node, Node]]:
    """Two nodes that reach each other at ADDRESSES through INTERFACE, and nothing else.

    Raises:
        NotPermitted: when neither this user nor a user namespace of his may make one.
    """
    if sys.platform != "linux":
        raise NotPermitted(f"network namespaces: {sys.platform} has none")
    with ExitStack() as stack:
        try:
            nodes = _make(stack, own_user=False)
        except NotPermitted:
            nodes = _make(stack, own_user=True)
        first, second = nodes
        cable = ["ip", "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", str(second.pid)]
        first.run(*cable)
        for node, address in zip(nodes, ADDRESSES, strict=True):
            node.run("ip", "address", "add", f"{address}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                node.run("ip", "link", "set", interface, "up")
        try:
            yield nodes
        finally:
            kill([process for node in nodes for process in node.processes()])


def _make(stack: ExitStack, *, own_user: bool) -> tuple[Node, Node]:
    make = ["unshare", "--net"]
    first = Node(stack, [*make, "--user", "--map-root-user"] if own_user else make, own_user=own_user)
    return first, Node(stack, first.inside(*make, network=False), own_user=own_user)
