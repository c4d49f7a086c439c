"""launchd: a property list of the user's agents or the machine's daemons.

launchd reads no file of variables: they are in the property list, which is therefore readable by its owner alone. launchd has no account of
its own for a daemon either, and root is none that should read other people's requests: a daemon needs `--run-as`.
"""

from __future__ import annotations

import os
import plistlib
import time
from pathlib import Path
from typing import Any

from quire.cli.services.plan import MARGIN, MARK, File, Service, must, run
from quire.observe.errors import BadRequest, NotFound, QuireError

UNLOAD_SECONDS = 600.0


class Launchd:
    """Jobs of one of launchd's domains."""

    def __init__(self, system: bool):
        self.system = system
        base = Path("/Library") if system else Path("~/Library").expanduser()
        self.lists = base / ("LaunchDaemons" if system else "LaunchAgents")
        self.said = base / "Logs"
        self.domain = "system" if system else f"gui/{os.getuid()}"

    def home(self, service: str, run_as: str | None) -> Path | None:
        import pwd

        if not self.system:
            return None
        if run_as is None:
            raise BadRequest("a daemon of launchd needs an account", cure="say --run-as NAME; root is not a good one")
        try:
            return Path(pwd.getpwnam(run_as).pw_dir) / ".cache" / "quire"
        except KeyError:
            raise NotFound(f"there is no account {run_as!r}", cure="make one, or name another") from None

    def paths(self, service: str) -> list[Path]:
        return [self.lists / f"{_label(service)}.plist"]

    def kept(self, service: str) -> dict[str, str]:
        try:
            found = plistlib.loads(self.paths(service)[0].read_bytes()).get("EnvironmentVariables", {})
        except (FileNotFoundError, plistlib.InvalidFileException, ValueError):
            return {}
        return {str(name): str(value) for name, value in found.items()}

    def files(self, service: Service) -> list[File]:
        log = str(self._log(service.name))
        job: dict[str, Any] = {
            "Label": _label(service.name),
            "ProgramArguments": list(service.command),
            "EnvironmentVariables": service.variables,
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": 10,
            "ExitTimeOut": int(service.drain) + MARGIN,
            "StandardOutPath": log,
            "StandardErrorPath": log,
            "Umask": 0o077,
            "ProcessType": "Interactive",  # otherwise launchd throttles its processor and disk
        }
        if service.run_as:
            job["UserName"] = service.run_as
        head, _, rest = plistlib.dumps(job, sort_keys=False).decode().partition("\n")
        return [File(self.paths(service.name)[0], f"{head}\n<!-- {MARK}; it may hold keys -->\n{rest}", 0o600)]

    def _log(self, service: str) -> Path:
        return self.said / f"{_label(service)}.log"

    def start(self, service: str, changed: bool) -> None:
        target = f"{self.domain}/{_label(service)}"
        loaded = run("launchctl", "print", target, quiet=True) == 0
        if loaded and not changed:
            return
        if loaded:
            self._unload(target)
        must("launchctl", "enable", target)
        must("launchctl", "bootstrap", self.domain, str(self.paths(service)[0]))

    def _unload(self, target: str) -> None:
        """Take the job out, and wait until it is: launchd answers before the process has drained."""
        must("launchctl", "bootout", target)
        until = time.monotonic() + UNLOAD_SECONDS
        while run("launchctl", "print", target, quiet=True) == 0:
            if time.monotonic() > until:
                raise QuireError(f"{target} does not stop", cure="look at what it says: `quire service logs`")
            time.sleep(0.2)

    def stop(self, service: str) -> None:
        target = f"{self.domain}/{_label(service)}"
        if run("launchctl", "print", target, quiet=True) == 0:
            self._unload(target)

    def reload(self) -> None:
        pass  # launchd reads its lists when they are loaded

    def status(self, service: str) -> int:
        return run("launchctl", "print", f"{self.domain}/{_label(service)}")

    def logs(self, service: str, lines: int, follow: bool) -> int:
        return run("tail", "-n", str(lines), *(["-F"] if follow else []), str(self._log(service)))

    def hints(self, service: str) -> list[str]:
        return []


def _label(service: str) -> str:
    return f"dev.quire.{service}"
