"""A sharded checkpoint on disk: a directory of the ranks' files and a manifest with their hashes, complete or not there.

step_00000040.sharded/
    __0_0.distcp, __1_0.distcp ...    the tensors that each rank has written
    .metadata                         which part of which tensor is where (a pickle of torch.distributed.checkpoint)
    state.pt                          everything but tensors
    manifest.json                     size and SHA-256 of each file, written last

The hashes reveal damage: a file that is missing, truncated or changed. They do not protect from somebody who can write in the
directory, and can write another manifest. Therefore nothing here is parsed in a way that can execute code (sharded_read.py).
"""

import json
import os
import shutil
from pathlib import Path
from typing import IO, Any, NamedTuple

from ddp_lab.resilience.checkpoint_files import sha256, sync_folder
from ddp_lab.world.runtime import Runtime

SUFFIX = ".sharded"
MANIFEST = "manifest.json"
METADATA = ".metadata"
STATE = "state.pt"
VERSION = 1  # of this layout


class FileRecord(NamedTuple):
    """What the manifest has about a file: its size in bytes and its SHA-256 in hexadecimal."""

    bytes: int
    sha256: str


def is_sharded(path: Path | str) -> bool:
    """Return whether a path is that of a sharded checkpoint, by its name or its manifest."""
    return Path(path).suffix == SUFFIX or (Path(path) / MANIFEST).is_file()


def record_file(path: Path) -> FileRecord:
    """Return the size and the SHA-256 of a file."""
    return FileRecord(path.stat().st_size, sha256(path))


def sync(file: IO[Any]) -> None:
    """Write a file's buffers to the disk."""
    file.flush()
    os.fsync(file.fileno())


def write_manifest(folder: Path, files: dict[str, FileRecord]) -> None:
    """Write the manifest of a directory, and sync both to the disk. It makes the directory complete."""
    with (folder / MANIFEST).open("w") as file:
        json.dump({"version": VERSION, "files": {name: record._asdict() for name, record in sorted(files.items())}}, file)
        sync(file)
    sync_folder(folder)


def read_manifest(folder: Path) -> dict[str, FileRecord] | None:
    """Return the manifest's records by name of the file; None if it is missing or is not a manifest.

    It is plain JSON. Names that lead out of the directory are not accepted.
    """
    try:
        content = json.loads((folder / MANIFEST).read_text())
        if content["version"] != VERSION:
            return None
        files = {
            str(name): FileRecord(int(record["bytes"]), str(record["sha256"])) for name, record in content["files"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return files if {METADATA, STATE} <= files.keys() and all(name == Path(name).name for name in files) else None


def damage_of_shards(folder: Path, runtime: Runtime) -> str | None:
    """Return why a sharded checkpoint cannot be used; None if all files have the size and SHA-256 in its manifest.

    Collective, and the same on every rank: each rank reads some of the files, and no rank returns before all are checked.
    """
    files = read_manifest(folder)
    problems = [f"{MANIFEST} is missing or damaged"] if files is None else []
    for name in sorted(files or {})[runtime.rank :: runtime.world_size]:
        try:
            expected, size = (files or {})[name], (folder / name).stat().st_size
            if size != expected.bytes:
                problems.append(f"{name} has {size:,} bytes instead of {expected.bytes:,}")
            elif sha256(folder / name) != expected.sha256:
                problems.append(f"the SHA-256 of {name} differs from that in {MANIFEST}")
        except OSError as error:
            problems.append(f"{name}: {error.strerror}")
    found = runtime.collect("damaged shards", "; ".join(problems))
    return runtime.agree("damage", lambda: "; ".join(dict.fromkeys(filter(None, found or []))) or None)


def publish_shards(temporary: Path, folder: Path) -> None:
    """Give a complete directory its final name, in place of another one of that name, and sync the directory above it.

    Raises:
        OSError: it cannot be renamed.
    """
    replaced = folder.with_suffix(f"{SUFFIX}.replaced.tmp")
    if folder.exists():
        os.rename(folder, replaced)  # a directory that is not empty cannot be replaced by renaming another
    os.rename(temporary, folder)
    sync_folder(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def link_shards(source: Path, folder: Path) -> None:
    """Give the files of a complete directory a second name in another directory, or copy them where that is not possible.

    Raises:
        OSError: they can be neither linked nor copied.
    """
    temporary = folder.with_suffix(f"{SUFFIX}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    for name in [*sorted(read_manifest(source) or {}), MANIFEST]:
        try:
            os.link(source / name, temporary / name)
        except OSError:  # a file system without hard links
            shutil.copyfile(source / name, temporary / name)
    sync_folder(temporary)
    publish_shards(temporary, folder)


def remove_shards(folder: Path) -> None:
    """Remove a sharded checkpoint. It is renamed first, so that a kill meanwhile leaves no damaged one."""
    removed = folder.with_suffix(f"{SUFFIX}.removed.tmp")
    shutil.rmtree(removed, ignore_errors=True)
    os.rename(folder, removed)
    shutil.rmtree(removed, ignore_errors=True)


def finish_interrupted_publish(parent: Path) -> None:
    """Clean up after a launch that was killed while it saved: rename what is complete, remove what is not."""
    for ending in (".tmp", ".replaced.tmp", ".removed.tmp"):  # a complete new directory comes before the one that it replaces
        for temporary in parent.glob(f"*{SUFFIX}{ending}"):
            folder = temporary.with_name(temporary.name.removesuffix(ending))
            if ending != ".removed.tmp" and read_manifest(temporary) is not None and not folder.exists():
                os.rename(temporary, folder)
            else:
                shutil.rmtree(temporary, ignore_errors=True)
