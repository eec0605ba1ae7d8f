"""Manifests: every damage to a checkpoint is seen before it is loaded."""

from __future__ import annotations

import json
import random
import zlib
from pathlib import Path

import pytest

from lit_encoders.resume.manifest import (
    FORMAT,
    Manifest,
    NewerFormatError,
    check,
    checksum,
    describe,
    manifest_path,
    read_manifest,
    write_manifest,
)

CONTENT = bytes(random.Random(0).randrange(256) for _ in range(5000))


def one_file(folder: Path) -> Path:
    path = folder / "step-00000007.ckpt"
    path.write_bytes(CONTENT)
    return path


def sharded(folder: Path) -> Path:
    path = folder / "step-00000007.ckpt"
    (path / "deep").mkdir(parents=True)
    (path / ".metadata").write_bytes(CONTENT[:50])
    (path / "deep" / "shard").write_bytes(CONTENT[50:])
    return path


def test_checksum_is_zlib_s(tmp_path: Path) -> None:
    path = one_file(tmp_path)
    path.write_bytes(CONTENT * 2000)  # More than a block.
    assert checksum(path) == zlib.crc32(CONTENT * 2000)


@pytest.mark.parametrize("make", [one_file, sharded])
def test_what_was_written_is_sound(tmp_path: Path, make) -> None:  # type: ignore[no-untyped-def]
    path = make(tmp_path)
    write_manifest(describe(path, 7, ended=True), path)
    found = read_manifest(path)
    assert found == describe(path, 7, ended=True)
    assert (found.step, found.ended, sum(size for size, _ in found.files.values())) == (7, True, 5000)
    check(path, found)
    assert {file.name for file in tmp_path.iterdir()} == {"step-00000007.ckpt", "step-00000007.json"}


def test_cut_off_anywhere_is_seen(tmp_path: Path) -> None:
    path = one_file(tmp_path)
    known = describe(path, 7, ended=False)
    for tenth in range(10):
        path.write_bytes(CONTENT[: tenth * 500])
        with pytest.raises(ValueError, match=rf"^it has {tenth * 500:,} of 5,000 bytes$"):
            check(path, known)
    path.unlink()
    with pytest.raises(ValueError, match=r"^it is missing$"):
        check(path, known)


def test_every_flipped_bit_is_seen(tmp_path: Path) -> None:
    path = one_file(tmp_path)
    known = describe(path, 7, ended=False)
    draw = random.Random(1)
    for _ in range(200):
        changed = bytearray(CONTENT)
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=r"^it has other content than was written$"):
            check(path, known)


def test_a_shard_is_named(tmp_path: Path) -> None:
    path = sharded(tmp_path)
    known = describe(path, 7, ended=False)
    (path / "deep" / "shard").write_bytes(CONTENT[51:])
    with pytest.raises(ValueError, match=r"^its file deep/shard has 4,949 of 4,950 bytes$"):
        check(path, known)
    (path / "deep" / "shard").unlink()
    with pytest.raises(ValueError, match=r"^its file deep/shard is missing$"):
        check(path, known)


def test_manifests_that_cannot_be_read(tmp_path: Path) -> None:
    path = one_file(tmp_path)
    with pytest.raises(ValueError, match=r"^it has no manifest: it was cut off while it was written$"):
        read_manifest(path)
    write_manifest(Manifest(1, False, {"": (1, 2)}), path)
    text = manifest_path(path).read_text()
    for damaged in (text[:20], "[]", "{}", "\x00" * 30, text.replace('"step"', '"stop"')):
        manifest_path(path).write_text(damaged)
        with pytest.raises(ValueError, match=r"^its manifest is damaged$"):
            read_manifest(path)
    manifest_path(path).write_text(json.dumps({**json.loads(text), "format": FORMAT + 1, "more": 1}))
    with pytest.raises(NewerFormatError, match=rf"^its format is {FORMAT + 1}, and this version reads up to {FORMAT}$"):
        read_manifest(path)
