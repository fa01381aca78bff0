import os
import stat

import pytest

from jaxslm.files import atomic_output, check_destination

OWNS = ("config.json", "*.safetensors")


def write(path, text: str) -> None:
    """A file, or a folder of one owned file where the name has no suffix."""
    if path.suffix:
        path.write_text(text)
    else:
        path.mkdir()
        (path / "config.json").write_text(text)


def read(path) -> str:
    return (path / "config.json").read_text() if path.is_dir() else path.read_text()


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("name", ["out", "out.pt"])
def test_output_appears_when_the_block_ends(tmp_path, name):
    with atomic_output(tmp_path / name, overwrite=False) as path:
        assert path.name == name
        write(path, "new")
        assert not (tmp_path / name).exists()
    assert read(tmp_path / name) == "new"
    assert names(tmp_path) == [name]


def test_output_may_be_named_relative_to_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with atomic_output("out.pt", overwrite=False) as path:
        write(path, "new")
    assert read(tmp_path / "out.pt") == "new"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("name", ["out", "out.pt"])
def test_failure_leaves_nothing(tmp_path, name, error):
    def fail():
        with atomic_output(tmp_path / name, overwrite=False) as path:
            write(path, "half")
            raise error

    with pytest.raises(error):
        fail()
    assert names(tmp_path) == []


def test_a_block_that_makes_nothing_is_an_error_and_leaves_nothing(tmp_path):
    with pytest.raises(FileNotFoundError), atomic_output(tmp_path / "out", overwrite=False):
        pass
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", ["out", "out.pt"])
def test_failure_leaves_the_earlier_output(tmp_path, name):
    write(tmp_path / name, "old")

    def fail():
        with atomic_output(tmp_path / name, overwrite=True, owns=OWNS) as path:
            write(path, "half")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        fail()
    assert read(tmp_path / name) == "old"
    assert names(tmp_path) == [name]


def test_failure_to_move_leaves_the_earlier_folder(tmp_path, monkeypatch):
    write(tmp_path / "out", "old")
    replace = type(tmp_path).replace

    def refuse(self, target):
        if target == tmp_path / "out":
            raise PermissionError("no")
        return replace(self, target)

    monkeypatch.setattr(type(tmp_path), "replace", refuse)

    def run():
        with atomic_output(tmp_path / "out", overwrite=True, owns=OWNS) as path:
            write(path, "new")

    with pytest.raises(PermissionError):
        run()
    assert read(tmp_path / "out") == "old"
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("name", ["out", "out.pt"])
def test_existing_destination_is_refused_before_the_block_runs(tmp_path, name):
    write(tmp_path / name, "old")
    with (
        pytest.raises(FileExistsError, match=r"out.* exists: pass --overwrite"),
        atomic_output(tmp_path / name, overwrite=False, owns=OWNS),
    ):
        pytest.fail("the block ran")
    assert read(tmp_path / name) == "old"
    assert names(tmp_path) == [name]


@pytest.mark.parametrize(("old", "new"), [("out", "out"), ("out.pt", "out.pt")])
def test_overwrite_replaces_whole(tmp_path, old, new):
    write(tmp_path / old, "old")
    if not (tmp_path / old).suffix:
        (tmp_path / old / "model.safetensors").write_text("old")
    with atomic_output(tmp_path / new, overwrite=True, owns=OWNS) as path:
        write(path, "new")
        assert read(tmp_path / old) == "old"
    assert read(tmp_path / new) == "new"
    assert names(tmp_path) == [new]
    if not (tmp_path / new).suffix:
        assert names(tmp_path / new) == ["config.json"]


def test_overwrite_replaces_a_folder_by_a_file_and_a_file_by_a_folder(tmp_path):
    (tmp_path / "out").mkdir()
    with atomic_output(tmp_path / "out", overwrite=True, owns=OWNS) as path:
        path.write_text("new")
    assert (tmp_path / "out").read_text() == "new"
    with atomic_output(tmp_path / "out", overwrite=True, owns=OWNS) as path:
        write(path, "newer")
    assert read(tmp_path / "out") == "newer"
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("foreign", ["notes.txt", "config.json.bak", "folder/", "config.json/"])
def test_overwrite_refuses_a_folder_that_holds_something_else(tmp_path, foreign):
    out = tmp_path / "out"
    out.mkdir()
    (out / "model.safetensors").write_text("ours")
    if foreign.endswith("/"):
        (out / foreign).mkdir()
    else:
        (out / foreign).write_text("theirs")
    with (
        pytest.raises(FileExistsError, match=f"holds {foreign.rstrip('/')}, which is not output"),
        atomic_output(out, overwrite=True, owns=OWNS),
    ):
        pytest.fail("the block ran")
    assert names(out) == sorted(["model.safetensors", foreign.rstrip("/")])


def test_overwrite_refuses_links_and_devices(tmp_path):
    (tmp_path / "target").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "dangling", "pipe"):
        with pytest.raises(FileExistsError, match=f"{name} is a link or a device"):
            check_destination(tmp_path / name, overwrite=True)
        with pytest.raises(FileExistsError, match=f"{name} exists"):
            check_destination(tmp_path / name, overwrite=False)


def test_missing_parent_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere does not exist: create it first"):
        check_destination(tmp_path / "nowhere" / "out", overwrite=True)


@pytest.mark.parametrize(
    ("umask", "file_mode", "folder_mode"), [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700)]
)
def test_permissions_follow_the_umask(tmp_path, umask, file_mode, folder_mode):
    before = os.umask(umask)
    try:
        for name in ("out", "out.pt"):
            with atomic_output(tmp_path / name, overwrite=False) as path:
                write(path, "new")
        assert os.umask(umask) == umask
    finally:
        os.umask(before)
    modes = {
        path.relative_to(tmp_path).as_posix(): stat.S_IMODE(path.stat().st_mode)
        for path in tmp_path.rglob("*")
    }
    assert modes == {"out": folder_mode, "out/config.json": file_mode, "out.pt": file_mode}


def test_a_folder_inside_is_owned_by_patterns_that_lead_into_it(tmp_path):
    owns = ("meta.json", "train/*.bin")
    out = tmp_path / "train"  # its own name leads nowhere
    (out / "train").mkdir(parents=True)
    (out / "meta.json").touch()
    (out / "train" / "a.bin").touch()
    check_destination(out, overwrite=True, owns=owns)
    for other in ("train/meta.json", "a.bin", "val/a.bin", "train/deep/a.bin"):
        path = out / other
        path.parent.mkdir(exist_ok=True)
        path.touch()
        first = other.removesuffix("/a.bin")  # a folder that is not entered
        with pytest.raises(FileExistsError, match=f"holds {first}, which is not output"):
            check_destination(out, overwrite=True, owns=owns)
        path.unlink()
        if path.parent not in (out, out / "train"):
            path.parent.rmdir()
    (out / "train" / "a.bin").unlink()
    (out / "train").rmdir()
    (out / "train").symlink_to(tmp_path)
    with pytest.raises(FileExistsError, match="holds train, which"):
        check_destination(out, overwrite=True, owns=owns)
