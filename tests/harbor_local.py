"""A Harbor environment of processes in a folder, for tests without Docker. Harbor imports it."""

import asyncio
import os
import re
import shutil
import tempfile
from pathlib import Path

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities

INSIDE = re.compile(r"(?<![\w./-])/(logs|tests|app|solution)\b")  # what a container would have


class LocalEnvironment(BaseEnvironment):
    """Runs commands in the trial's folder, with the container's paths replaced."""

    @staticmethod
    def type() -> str:
        return "local"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities()

    @property
    def _root(self) -> Path:
        return self.trial_paths.trial_dir / "root"

    def _here(self, text: str) -> str:
        return INSIDE.sub(lambda found: str(self._root) + found[0], text)

    def _validate_definition(self) -> None:
        """Do nothing: there is no image."""

    async def start(self, force_build: bool) -> None:
        self._sockets = tempfile.mkdtemp()  # short, because paths of sockets may not be long
        for name in ("app", "tests", "logs/agent", "logs/verifier", "logs/artifacts"):
            (self._root / name).mkdir(parents=True, exist_ok=True)

    async def stop(self, delete: bool) -> None:
        await self.exec("tmux kill-server")
        shutil.rmtree(self._sockets)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        shutil.copy(source_path, self._here(target_path))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        shutil.copytree(source_dir, self._here(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        shutil.copy(self._here(source_path), target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        shutil.copytree(self._here(source_dir), target_dir, dirs_exist_ok=True)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        process = await asyncio.create_subprocess_exec(
            "bash",
            "-c",
            self._here(command),
            cwd=self._here(cwd or "/app"),
            env={**os.environ, "TMUX_TMPDIR": self._sockets, **(env or {})},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(process.communicate(), timeout_sec)
        return ExecResult(
            stdout=out.decode(errors="replace"),
            stderr=err.decode(errors="replace"),
            return_code=process.returncode or 0,
        )
