"""Copies of a run's checkpoints at a URL of fsspec, `checkpoint.mirror`.

A launch on an empty disk resumes from them.

writer thread   ... commit a checkpoint | commit the next one ...
mirror thread                           | upload files, then SHA256SUMS | remove old checkpoints |

Training waits for neither thread. Old checkpoints are those that are no longer on the disk.

URL/NAME/step_00000040.pt/      the checkpoint's files, and RUN_FILES as they were then
    SHA256SUMS                  of all of them, uploaded last: without it this is no checkpoint
URL/NAME/best                   the name of the best checkpoint

Rank 0 uploads both formats: all nodes write the shards of a checkpoint to one directory.
"""

import hashlib
import os
import queue
import re
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_lab.checkpoints.files import (
    STATE,
    SUMS,
    best_in,
    is_sharded,
    link_best,
    sha256,
    step_of,
    steps_in,
    sums_of,
    sync,
    write_text,
)
from ddp_lab.config.errors import ConfigError, describe_error
from ddp_lab.config.types import EXTRAS
from ddp_lab.observe.log import log
from ddp_lab.observe.trackers.base import Status
from ddp_lab.training.hooks import Hook

RUN_FILES = (
    "config.yaml",
    "data.json",
    "environment.json",
    "metrics.jsonl",
    *(f"tracker.{name}.json" for name in EXTRAS),
)
STEP = re.compile(r"step_\d+\.(pt|sharded)")


class Mirror(Hook):
    """The mirror of one run, and the hook that uploads its checkpoints.

    Args:
        url: the config key `checkpoint.mirror`.
        run_dir: the run directory, whose name is that of the mirror's directory.
        timeout: seconds that the end of a run waits for the last upload.

    Raises:
        ConfigError: fsspec does not know the URL, or a package for it is missing.
    """

    def __init__(self, url: str, run_dir: Path, timeout: float = 0.0):
        self.timeout = timeout
        self.key = f"checkpoint.mirror={url}"
        self.run_dir = run_dir
        self.folder = run_dir / "checkpoints"
        from fsspec.core import url_to_fs  # takes 0.1 s

        self.fs: Any
        try:
            self.fs, root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            if isinstance(error, ImportError):
                remedy = "pip install 'ddp_lab[s3]', for s3://, or that package"
            else:
                remedy = "use another URL"
            raise ConfigError(
                f"{self.key}: cannot be used ({describe_error(error)}); {remedy}"
            ) from None

        self.remote = f"{root.rstrip('/')}/{run_dir.name}"
        self._failed = False
        self._queue: queue.Queue[Path] = queue.Queue()
        # A daemon: an upload that hangs must not keep the process alive.
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)

    def on_checkpoint(self, path: Path) -> None:
        self.upload(path)

    def close(self, status: Status) -> None:
        self.finish(self.timeout)

    def upload(self, path: Path) -> None:
        """Upload a checkpoint in the background. An error is logged once."""
        if not self._thread.is_alive():
            self._thread.start()
        self._queue.put(path)

    def finish(self, timeout: float) -> None:
        """Wait until the last upload has ended, at most `timeout` seconds."""
        with self._queue.all_tasks_done:
            if not self._queue.all_tasks_done.wait_for(
                lambda: not self._queue.unfinished_tasks, timeout
            ):
                log.error(
                    f"{self.key}: the last checkpoint was not uploaded within {timeout:.0f} s"
                )

    def _work(self) -> None:
        while True:
            path = self._queue.get()
            try:
                self._copy(path)
            except Exception as error:  # of any storage: training continues without a mirror
                with suppress(Exception):
                    # on a full disk a part of it would keep out the next one
                    self._remove(path.name)
                # newer checkpoints may have replaced it meanwhile
                if path.exists() and not self._failed:
                    self._failed = True
                    log.error(
                        f"{self.key}: {path.name} could not be uploaded ({describe_error(error)}); "
                        "training continues"
                    )
            self._queue.task_done()

    def _copy(self, path: Path) -> None:
        """Upload a checkpoint, and remove those that are no longer on the disk.

        Most are removed first: a storage for `checkpoint.keep` and one more is large enough. The
        newest complete one and the best stay until the upload has ended.
        """
        target = f"{self.remote}/{path.name}"
        sums = sums_of(path).read_text()
        self._remove(path.name)  # an earlier one of the same step
        outdated = set(self._names()) - {step.name for step in steps_in(self.folder)}
        spared = {*self._complete()[:1], self._best()}
        for name in outdated - spared:
            self._remove(name)

        self.fs.makedirs(target, exist_ok=True)
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            if file.name != SUMS:
                self.fs.put_file(str(file), f"{target}/{file.name}")
        for file in (self.run_dir / name for name in RUN_FILES):
            if file.exists():
                content = file.read_bytes()
                self.fs.pipe_file(f"{target}/{file.name}", content)
                sums += f"{hashlib.sha256(content).hexdigest()}  {file.name}\n"

        self.fs.pipe_file(f"{target}/{SUMS}", sums.encode())
        if best := best_in(self.folder):
            self.fs.pipe_file(f"{self.remote}/best", best.resolve().name.encode())
        for name in outdated & spared:
            self._remove(name)

    def _names(self) -> list[str]:
        """Return the names of all checkpoints there, also of partial ones, newest first."""
        self.fs.invalidate_cache()
        entries = self.fs.ls(self.remote, detail=False) if self.fs.exists(self.remote) else []
        return sorted(
            filter(STEP.fullmatch, (Path(entry).name for entry in entries)),
            key=lambda name: -step_of(Path(name)),
        )

    def _complete(self) -> list[str]:
        """Return the names of the checkpoints there, newest first."""
        return [name for name in self._names() if self.fs.exists(f"{self.remote}/{name}/{SUMS}")]

    def _best(self) -> str | None:
        """Return the name of the best checkpoint."""
        if self.fs.exists(f"{self.remote}/best"):
            return self.fs.cat_file(f"{self.remote}/best").decode()
        return None

    def _remove(self, name: str) -> None:
        """Remove a checkpoint there: first its hashes, without which it is none."""
        for path in (f"{self.remote}/{name}/{SUMS}", f"{self.remote}/{name}"):
            if self.fs.exists(path):
                self.fs.rm(path, recursive=True)

    def begin(self, resume: str) -> None:
        """Prepare a launch.

        Download what an empty disk has lost, and check that no other run has checkpoints there.

        Args:
            resume: the config key.

        Raises:
            ConfigError: the mirror cannot be read, has checkpoints of which none is valid, or those
                of another run.
        """
        remedy = f"Choose another name, remove {self.remote}"
        if (self.run_dir / "status.json").exists() or steps_in(self.folder):
            # a mirror that does not answer now does not keep a run from going on
            with suppress(OSError, ValueError):
                metrics = f"{self.remote}/{(self._complete() or [''])[0]}/metrics.jsonl"
                there = []
                if self.fs.exists(metrics):
                    there = self.fs.cat_file(metrics).splitlines()[:1]
                here = (self.run_dir / "metrics.jsonl").read_bytes().splitlines()[:1]
                if there and here and there != here:  # their rates and losses differ
                    raise ConfigError(
                        f"{self.key}: {self.remote} has checkpoints of another run. {remedy}, or "
                        "use another URL"
                    )
        elif resume == "auto":
            self._restore()
        elif resume == "never" and self._names():
            raise ConfigError(
                f"resume=never: {self.remote} already contains a run. {remedy}, or use resume=auto "
                "to resume the run"
            )

    def _restore(self) -> None:
        """Download the newest valid checkpoint and the best one to the run directory.

        A damaged one is logged.

        Raises:
            ConfigError: the mirror cannot be read, or has checkpoints of which none is valid.
        """
        bad: list[str] = []
        try:
            names = self._complete()
            best = self._best()
            newest = next((name for name in names if self._download(name, bad)), None)
            if newest and best in names and (best == newest or self._download(best, bad)):
                link_best(self.folder / best)
        except Exception as error:  # of any storage
            raise ConfigError(
                f"{self.key}: {self.remote} cannot be read ({describe_error(error)}). Use another "
                "URL, or null"
            ) from None

        if bad and not newest:
            raise ConfigError(
                f"{self.key}: none of the checkpoints is valid: {'; '.join(bad)}. Use another name "
                "for a new run"
            )
        for problem in bad:
            log.warning(f"{self.key}: {problem}; another checkpoint was used")

    def _download(self, name: str, bad: list[str]) -> bool:
        """Download a checkpoint, check its hashes, and only then give its files their names.

        Return whether it is valid.
        """
        source = f"{self.remote}/{name}"
        folder = self.folder / f"{name}.tmp"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        lines = [
            line.split()
            for line in self.fs.cat_file(f"{source}/{SUMS}").decode(errors="replace").splitlines()
        ]
        digests = {
            line[-1]: line[0]
            for line in lines
            if len(line) == 2 and re.fullmatch(r"\w[\w.-]*", line[1])
        }
        # a checkpoint without it is damaged
        digests.setdefault(STATE if is_sharded(self.folder / name) else name, "")

        for file, digest in digests.items():
            if self.fs.exists(f"{source}/{file}"):
                self.fs.get_file(f"{source}/{file}", str(folder / file))
            if not (folder / file).exists() or sha256(folder / file) != digest:
                bad.append(f"{name}/{file} is missing, or its SHA-256 differs")
                shutil.rmtree(folder)
                return False
            sync(folder / file)

        path = self.folder / name
        run_files = digests.keys() & set(RUN_FILES)
        for file in run_files:
            if (self.run_dir / file).exists():  # from a newer checkpoint
                (folder / file).unlink()
            else:
                os.replace(folder / file, self.run_dir / file)

        sums = "".join(
            f"{digest}  {file}\n" for file, digest in digests.items() if file not in run_files
        )
        write_text(folder / SUMS if is_sharded(path) else sums_of(path), sums)
        sync(folder)
        os.replace(folder if is_sharded(path) else folder / name, path)
        sync(self.folder)
        shutil.rmtree(folder, ignore_errors=True)
        return True
