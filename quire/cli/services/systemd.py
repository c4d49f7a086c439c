"""systemd: a unit of the user's or the machine's manager, and a file of variables beside it.

A unit is read in three ways that differ in what they take for special: words of ExecStart= (quotes, backslashes, % and $), paths (% alone)
and the file of variables (quotes and backslashes, as a shell's). Each has a function here; the tests let systemd and a shell read them back.

A user's manager cannot set up mount namespaces everywhere (they need unprivileged user namespaces), so a user's unit has only the
restrictions that need none. Only the HTTP process gets SIGTERM (KillMode=mixed): it drains, and ends the engine process when that is done.
"""

from __future__ import annotations

import re
from pathlib import Path

from quire.cli.services.plan import MARGIN, MARK, File, Service, must, run
from quire.observe.errors import BadRequest

_PLAIN = re.compile(r"[A-Za-z0-9_./:=@,+-]+")
_RESTRICTED = """\
NoNewPrivileges=yes
RestrictSUIDSGID=yes
RestrictRealtime=yes
LockPersonality=yes
SystemCallArchitectures=native
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
UMask=0077
"""
_OF_THE_MACHINE = """\
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
RestrictNamespaces=yes
CapabilityBoundingSet=
AmbientCapabilities=
"""


def word(text: str) -> str:
    """One word of ExecStart=, as systemd reads it back."""
    return _quoted(text.replace("$", "$$"))


def path_value(path: Path) -> str:
    """A path that is a whole value: nothing but % is special there."""
    return str(path).replace("%", "%%")


def _quoted(text: str) -> str:
    text = text.replace("%", "%%")
    if _PLAIN.fullmatch(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def program(text: str) -> str:
    """The first word of ExecStart=, in which $ is no variable and some first letters mean something."""
    if "$" in text or not text.startswith("/"):
        raise BadRequest(
            f"systemd cannot start {text}", cure="install Quire where the path is absolute and without a dollar sign"
        )
    return _quoted(text)


def assignment(name: str, value: str) -> str:
    """A line of the file of variables."""
    return f'{name}="' + re.sub(r'(["\\$`])', r"\\\1", value) + '"'


def read_assignments(text: str) -> dict[str, str]:
    """The variables of such a file, by whomever it was edited since."""
    found = {}
    for line in text.splitlines():
        name, equals, value = line.strip().partition("=")
        if not equals or name.startswith(("#", ";")):
            continue
        if len(value) > 1 and value[0] == value[-1] == '"':
            value = re.sub(r'\\(["\\$`])', r"\1", value[1:-1])
        elif len(value) > 1 and value[0] == value[-1] == "'":
            value = value[1:-1]
        found[name] = value
    return found


class Systemd:
    """Units of one of systemd's managers."""

    def __init__(self, system: bool):
        self.system = system
        self.units = Path("/etc/systemd/system") if system else Path("~/.config/systemd/user").expanduser()
        self.settings = Path("/etc/quire") if system else Path("~/.config/quire").expanduser()
        self._which = () if system else ("--user",)

    def home(self, service: str, run_as: str | None) -> Path | None:
        return Path("/var/lib") / service if self.system else None

    def paths(self, service: str) -> list[Path]:
        return [self.units / f"{service}.service", self.settings / f"{service}.env"]

    def kept(self, service: str) -> dict[str, str]:
        try:
            return read_assignments(self.paths(service)[1].read_text())
        except FileNotFoundError:
            return {}

    def files(self, service: Service) -> list[File]:
        unit, settings = self.paths(service.name)
        lines = [f"# {MARK}: variables of {service.name}.service. Whoever reads this file has its keys."]
        lines += [assignment(*pair) for pair in service.variables.items()]
        return [File(unit, self._unit(service, settings)), File(settings, "\n".join(lines) + "\n", 0o600)]

    def _unit(self, service: Service, settings: Path) -> str:
        first, *rest = service.command
        account = ""
        if self.system:
            who = f"User={service.run_as}" if service.run_as else "DynamicUser=yes"
            account = f"{who}\nStateDirectory={service.name}\nStateDirectoryMode=0700\nEnvironment=HOME={path_value(service.home)}\n"
        wants = "Wants=network-online.target\nAfter=network-online.target\n" if self.system else ""
        return (
            f"# {MARK}; installing again overwrites it. What shall stay goes into a drop-in: systemctl edit {service.name}\n"
            f"[Unit]\nDescription=Quire, an LLM inference server ({service.name})\n{wants}"
            "StartLimitIntervalSec=300\nStartLimitBurst=5\n\n"
            f"[Service]\nExecStart={' '.join([program(first), *map(word, rest)])}\n"
            f"EnvironmentFile={path_value(settings)}\n{account}"
            "Restart=on-failure\nRestartSec=5\nRestartPreventExitStatus=2\n"
            f"KillMode=mixed\nTimeoutStopSec={int(service.drain) + MARGIN}\n"
            f"{_RESTRICTED}{_OF_THE_MACHINE if self.system else ''}\n"
            f"[Install]\nWantedBy={'multi-user.target' if self.system else 'default.target'}\n"
        )

    def start(self, service: str, changed: bool) -> None:
        must("systemctl", *self._which, "daemon-reload")
        must("systemctl", *self._which, "enable", f"{service}.service")
        must("systemctl", *self._which, "restart" if changed else "start", f"{service}.service")

    def stop(self, service: str) -> None:
        must("systemctl", *self._which, "disable", "--now", f"{service}.service")

    def reload(self) -> None:
        must("systemctl", *self._which, "daemon-reload")

    def status(self, service: str) -> int:
        return run("systemctl", *self._which, "--no-pager", "status", f"{service}.service")

    def logs(self, service: str, lines: int, follow: bool) -> int:
        return run(
            "journalctl",
            *self._which,
            "--no-pager",
            f"--unit={service}.service",
            f"--lines={lines}",
            *(["--follow"] if follow else []),
        )

    def hints(self, service: str) -> list[str]:
        import getpass

        if self.system or (Path("/var/lib/systemd/linger") / getpass.getuser()).exists():
            return []
        return ["it ends when you log out, and does not start with the machine: `loginctl enable-linger` changes both"]
