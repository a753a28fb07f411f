"""Checkpoints that are damaged, or in a folder that is shared, full or has other things: nothing is silently wrong."""

import json
import os
import random
import resource
import subprocess

import pytest
import torch
from typer.testing import CliRunner

from fpipe import Pipeline, Placement, handlers, interop
from fpipe.cli import app
from fpipe.interop import CheckpointError
from fpipe.interop.checkpoints.claims import Claim
from tests.support.combinations import examples

FILES = ["fpipe.json", ".metadata", "__0_0.distcp"]


def small(folder, size=64, **options):
    """Checkpoints in one process, and a training state."""
    pipeline = Pipeline([lambda p, x: x * p["w"]])
    plan = pipeline.plan(Placement.loop(1), 1)
    saved = interop.Checkpoints(folder, pipeline, plan, handler=handlers.Local(), **options)
    return saved, {"params": {0: {"w": torch.arange(float(size))}}, "step": 1, "rate": 0.125}


@pytest.mark.parametrize("file", FILES)
def test_no_flipped_bit_is_loaded(tmp_path, file):
    saved, tree = small(tmp_path)
    path = saved.save(**tree)
    good, draw = (path / file).read_bytes(), random.Random(0)
    for _ in range(examples(200)):
        damaged = bytearray(good)
        damaged[draw.randrange(len(good))] ^= 1 << draw.randrange(8)
        (path / file).write_bytes(damaged)
        with pytest.raises(CheckpointError):
            saved.load(**tree)
    (path / file).write_bytes(good)
    assert saved.load(**tree)["rate"] == 0.125


def test_the_check_can_be_left_out(tmp_path):
    saved, tree = small(tmp_path)
    path = saved.save(**tree) / "__0_0.distcp"
    content = path.read_bytes()
    at = content.index(torch.arange(64.0).numpy().tobytes()) + 4 * 7 + 2
    path.write_bytes(content[:at] + b"\x7f" + content[at + 1 :])
    with pytest.raises(CheckpointError, match=r"its __0_0\.distcp has not the content that was saved, by its hash"):
        saved.load(**tree)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp"):
        interop.export_safetensors(tmp_path, tmp_path / "x")
    assert saved.load(**tree, verify=False)["params"][0]["w"][7] != 7
    with pytest.raises(ValueError, match="no section is called 'verify'"):
        saved.save(**tree, verify=True)


def test_hashes_are_those_of_sha256sum_and_shared_between_ranks(pools, tmp_path):
    paths = pools(2).run(save_and_load, str(tmp_path))
    manifest = json.loads((tmp_path / paths[0] / "fpipe.json").read_text())
    assert set(manifest["hashes"]) == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    command = ["sha256sum", *manifest["hashes"]]
    shown = subprocess.run(command, cwd=tmp_path / paths[0], capture_output=True, text=True, check=True).stdout
    assert dict(line.split()[::-1] for line in shown.splitlines()) == manifest["hashes"]
    file = tmp_path / paths[0] / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    assert all("damaged: its __1_0.distcp has not" in text for text in pools(2).run(load_error, str(tmp_path)))


def checkpoints_of_ranks(rank, folder):
    pipeline = Pipeline([lambda p, x: x * p] * 2)
    saved = interop.Checkpoints(folder, pipeline, pipeline.plan(Placement.loop(2), 1), handler=handlers.Distributed())
    return saved, {"params": {rank: torch.ones(3)}}


def save_and_load(rank, folder):
    saved, tree = checkpoints_of_ranks(rank, folder)
    path = saved.save(**tree)
    saved.load(**tree)
    return path.name


def load_error(rank, folder):
    saved, tree = checkpoints_of_ranks(rank, folder)
    try:
        saved.load(**tree)
    except CheckpointError as error:
        return str(error)
    return "loaded"


def test_a_checkpoint_without_hashes_is_loaded(tmp_path):
    saved, tree = small(tmp_path)
    file = saved.save(**tree) / "fpipe.json"
    manifest = json.loads(file.read_text())
    del manifest["hashes"], manifest["hash"]
    file.write_text(json.dumps(manifest))
    assert saved.load(**tree)["rate"] == 0.125


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    "damage",
    [{key: value} for key in ("files", "nonpersistent", "plain", "hashes") for value in (None, 3, [1], {"a": 3})][:-1],
    ids=str,
)
def test_a_manifest_of_other_content_is_damaged(tmp_path, damage, verify):
    saved, tree = small(tmp_path)
    file = saved.save(**tree) / "fpipe.json"
    manifest = {**json.loads(file.read_text()), **damage}
    file.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"000001-step-1 is damaged|is of another model|lacks"):
        saved.load(**tree, verify=verify)


def test_the_command_verifies(tmp_path):
    saved, tree = small(tmp_path)
    path = saved.save(**tree)

    def verified(*words):
        return CliRunner().invoke(app, ["checkpoint", "verify", str(tmp_path), *words])

    assert verified().exit_code == 0
    (path / "__0_0.distcp").write_bytes(bytes((path / "__0_0.distcp").stat().st_size))
    result = verified("--json")
    assert [row["state"] for row in json.loads(result.stdout)["files"]] == ["right", "damaged"]
    assert result.exit_code == 1
    assert "__0_0.distcp changed since it was saved" in result.stderr


def test_a_full_disk_is_an_os_error_and_the_last_one_stays(tmp_path):
    saved, tree = small(tmp_path, size=1 << 16)
    first = saved.save(**tree)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(OSError, match=rf"File too large: .{tmp_path}"):
            saved.save(**tree)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert saved.latest() == first
    saved.save(**tree)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000001-step-1", "000002-step-1"]


def test_a_save_leaves_what_another_job_fills(tmp_path):
    saved, tree = small(tmp_path)
    with Claim() as other:
        unfinished = other.begin(tmp_path, 5)
        saved.save(**tree)
        assert unfinished.is_dir()
    saved.save(**tree)  # the other job has given up, or was killed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000002-step-1", "000003-step-1"]


def test_what_is_not_ours_stays_and_blocks_nothing(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder = tmp_path / "saved"
    (folder / "000007").mkdir(parents=True)
    (folder / "000007" / "mine").write_text("mine")
    (folder / ".unfinished-x").write_text("mine")
    for name in (".unfinished-y", ".unfinished-000003", "000008"):
        (folder / name).symlink_to(elsewhere)
    theirs = {*os.listdir(folder)}
    saved, tree = small(folder, keep=1)
    for _ in range(3):
        last = saved.save(**tree)
    assert {*os.listdir(folder)} == theirs | {last.name}
    assert (folder / "000007" / "mine").read_text() == "mine"
    assert elsewhere.is_dir()


def test_nothing_is_no_checkpoint(tmp_path):
    saved, tree = small(tmp_path)
    first = saved.save(**tree)
    with pytest.raises(ValueError, match="save needs a section on some rank"):
        saved.save()
    assert saved.latest() == first
    with pytest.raises(TypeError, match=r"load: path must be .*, not \{\}"):
        saved.load({})
    with pytest.raises(ValueError, match="keep must be at least 1, or None for all"):
        small(tmp_path, keep=1.5)
