import contextlib
import os

import pytest

from alpaca_ppo import atomic_io
from alpaca_ppo.atomic_io import (
    clean_leftovers,
    committed_path,
    list_committed,
    remove_folder,
    write_folder_atomically,
    write_text_atomically,
)
from tests.leftovers import work_folder


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def write(path, content):
    with write_folder_atomically(path) as tmp_dir:
        (tmp_dir / "deep").mkdir()
        (tmp_dir / "deep" / "file").write_text(content)


def content(path):
    return (path / "deep" / "file").read_text()


class Killed(BaseException):
    """Stands for a killed process, after which nothing is cleaned up."""


def test_a_folder_appears_only_when_it_is_complete(tmp_path):
    path = tmp_path / "made" / "checkpoint-1"
    with write_folder_atomically(path) as tmp_dir:
        (tmp_dir / "file").write_text("x")
        assert not path.exists()
        assert path.parent in tmp_dir.parents  # one file system, or the rename would copy
    assert names(path.parent) == ["checkpoint-1"]
    assert names(path) == ["file"]


def test_a_new_folder_replaces_the_old_one_whole(tmp_path):
    path = tmp_path / "final"
    write(path, "old")
    (path / "only_in_the_old").write_text("")
    write(path, "new")
    assert content(path) == "new"
    assert names(path) == ["deep"]
    assert names(tmp_path) == ["final"]


@pytest.mark.parametrize("target", ["there", "gone"])
def test_a_link_is_replaced_and_removed_and_what_it_points_to_stays(tmp_path, target):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("x")
    link = tmp_path / "folder"
    link.symlink_to(tmp_path / target)
    with atomic_io.write_folder_atomically(link) as folder:
        (folder / "new").touch()
    assert not link.is_symlink() and [path.name for path in link.iterdir()] == ["new"]
    link.rename(tmp_path / "written")
    link.symlink_to(tmp_path / target)
    atomic_io.remove_folder(link)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there", "written"]
    assert (tmp_path / "there" / "file").read_text() == "x"


def test_an_exception_leaves_the_old_folder_and_nothing_else(tmp_path):
    path = tmp_path / "final"
    write(path, "old")
    with pytest.raises(KeyboardInterrupt), write_folder_atomically(path) as tmp_dir:
        (tmp_dir / "file").write_text("half")
        raise KeyboardInterrupt
    assert content(path) == "old"
    assert names(tmp_path) == ["final"]


def test_a_rename_that_fails_leaves_the_old_folder_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "final"
    write(path, "old")
    rename = os.rename

    def failing(source, target):
        if os.path.basename(source) == "new.alpaca_ppo":
            raise OSError("no rename")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(OSError, match="no rename"):
        write(path, "new")
    assert content(path) == "old"
    assert names(tmp_path) == ["final"]


def test_every_file_is_forced_to_the_disk_before_the_rename(tmp_path, monkeypatch):
    forced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: forced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    rename = os.rename
    monkeypatch.setattr(os, "rename", lambda *paths: (forced.append("rename"), rename(*paths)))
    write(tmp_path / "final", "x")
    before = forced[: forced.index("rename")]
    assert {os.path.basename(path) for path in before} == {"deep", "file", "new.alpaca_ppo"}
    assert forced[-1] == str(tmp_path)


def test_leftovers_are_cleaned_and_other_hidden_files_stay(tmp_path):
    work_folder(tmp_path, "checkpoint-1", "new")
    (tmp_path / "checkpoint-1").mkdir()
    work_folder(tmp_path, "checkpoint-2", "new")
    work_folder(tmp_path, "checkpoint-3")
    (tmp_path / ".run.yaml.alpaca_ppo-tmp").write_text("half")
    (tmp_path / ".gitignore").write_text("*")
    clean_leftovers(tmp_path)
    assert names(tmp_path) == [".gitignore", "checkpoint-1"]


def test_what_this_program_did_not_write_is_left_alone_whatever_its_name(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    for name in (
        *(".mine.incomplete", ".notes.replaced", ".incomplete", ".replaced", ".mine.alpaca_ppo-tmp", "elsewhere"),
        *(".alpaca_ppo-tmp", ".old.alpaca_ppo-tmp/old", "mine.alpaca_ppo-tmp"),
    ):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "text").write_text(name)
    (tmp_path / ".empty.incomplete").mkdir()
    (tmp_path / ".file.incomplete").write_text("mine")
    (tmp_path / ".link.alpaca_ppo-tmp").symlink_to(elsewhere)
    before = {path: path.is_file() and path.read_text() for path in tmp_path.rglob("*")}
    clean_leftovers(tmp_path)
    assert {path: path.is_file() and path.read_text() for path in tmp_path.rglob("*")} == before
    assert list_committed(tmp_path, "old*") == []


def test_a_text_file_is_replaced_in_one_step(tmp_path, monkeypatch):
    path = tmp_path / "README.md"
    write_text_atomically(path, "old \ud83d é")
    assert path.read_bytes() == b"old \\ud83d \xc3\xa9"
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_text_atomically(path, "new")
    assert path.read_bytes().startswith(b"old")


def test_a_folder_that_a_killed_process_was_about_to_replace_is_still_one_of_those_kept(tmp_path):
    work_folder(tmp_path, "checkpoint-3", "old")
    for name in ("checkpoint-2", "checkpoint-10", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-4").write_text("no folder")
    found = list_committed(tmp_path, "checkpoint-*")
    assert [path.name for path in found] == ["checkpoint-10", "checkpoint-2", "checkpoint-3"]
    assert committed_path(tmp_path / "checkpoint-3") == tmp_path / ".checkpoint-3.alpaca_ppo-tmp/old.alpaca_ppo"
    assert committed_path(tmp_path / "checkpoint-2").name == "checkpoint-2"
    clean_leftovers(tmp_path)
    assert committed_path(tmp_path / "checkpoint-3").name == "checkpoint-3"


@pytest.mark.parametrize("number", range(12))
def test_a_process_killed_before_any_change_of_a_folder_leaves_the_old_content_or_the_new_and_then_no_rubbish(
    number, tmp_path, monkeypatch
):
    """Two folders are written, one of them over an older one, and one is removed: 12 changes or fewer between them."""
    write(tmp_path / "a", "old")
    write(tmp_path / "b", "old")
    with monkeypatch.context() as patch:
        count = []

        def killing(function):
            def killed(*args, **kwargs):
                if len(count) == number:
                    raise Killed
                count.append(function)
                return function(*args, **kwargs)

            return killed

        patch.setattr(os, "rename", killing(os.rename))
        patch.setattr(os, "rmdir", killing(os.rmdir))
        patch.setattr(os, "unlink", killing(os.unlink))
        patch.setattr(atomic_io, "_sync_to_disk", lambda path: None)
        with contextlib.suppress(Killed):
            write(tmp_path / "a", "new")
            remove_folder(tmp_path / "b")
    clean_leftovers(tmp_path)
    assert set(names(tmp_path)) <= {"a", "b"}
    assert content(tmp_path / "a") in ("old", "new")
    if (tmp_path / "b").exists():
        assert content(tmp_path / "b") == "old"
