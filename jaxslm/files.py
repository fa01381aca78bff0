"""Output that appears whole or not at all."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def atomic_output(
    destination: Path, *, overwrite: bool, owns: tuple[str, ...] = ()
) -> Iterator[Path]:
    """A temporary path beside `destination` that is moved there if the block succeeds.

    The block creates a file or a folder at the path it is given. If it fails, nothing is left and
    an earlier destination stays as it was.

    Args:
        destination: file or folder to create; its parent must exist.
        overwrite: replace an existing destination.
        owns: glob patterns of the files that an existing folder may hold to be replaced, with
            their folders: "config.json", "train/*.bin".

    Raises:
        FileExistsError: the destination exists and `overwrite` is not set, or it is a folder
            that holds something else.
        FileNotFoundError: the parent folder does not exist.
    """
    destination = Path(destination)
    check_destination(destination, overwrite=overwrite, owns=owns)
    destination = destination.resolve()  # "." has no name
    try:
        room = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
    except OSError as error:
        error.filename = str(destination)  # no one knows the temporary name
        raise
    made, replaced = room / destination.name, room / f"{destination.name}.replaced"
    try:
        yield made
        made.chmod(_default_mode(made))
        if destination.exists() and (destination.is_dir() or made.is_dir()):
            destination.rename(replaced)
        try:
            made.replace(destination)
        except BaseException:
            if replaced.exists():
                replaced.rename(destination)
            raise
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(destination)  # a failed write does not say where
        raise
    finally:
        shutil.rmtree(room, ignore_errors=True)


def check_destination(destination: Path, *, overwrite: bool, owns: tuple[str, ...] = ()) -> None:
    """Refuses a destination that `atomic_output` would refuse, before any work is done for it."""
    if not destination.absolute().parent.is_dir():
        raise FileNotFoundError(f"{destination.absolute().parent} does not exist: create it first")
    if not os.path.lexists(destination):
        return
    if not overwrite:
        raise FileExistsError(f"{destination} exists: pass --overwrite, or name another output")
    if destination.is_symlink() or not (destination.is_dir() or destination.is_file()):
        raise FileExistsError(f"{destination} is a link or a device: name a plain file or folder")
    if destination.is_dir():
        for other in _others(destination, owns):
            raise FileExistsError(
                f"{destination} holds {other.relative_to(destination)}, which is not output of "
                "this command: it is not overwritten; name another output"
            )


def _others(folder: Path, owns: tuple[str, ...]) -> Iterator[Path]:
    """What a folder holds that is not owned; folders that no pattern leads into are not entered."""
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            inside = tuple(
                pattern.partition("/")[2]
                for pattern in owns
                if "/" in pattern and path.match(pattern.partition("/")[0])
            )
            yield from _others(path, inside) if inside and not path.is_symlink() else [path]
        elif not any(path.match(pattern) for pattern in owns if "/" not in pattern):
            yield path


def _default_mode(path: Path) -> int:
    """The permissions that the user's umask gives a new file or folder."""
    umask = os.umask(0)
    os.umask(umask)
    return (0o777 if path.is_dir() else 0o666) & ~umask
