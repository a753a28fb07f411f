"""What is distributed: the source with its tests, the library alone, and an editable install of it."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import fpipe
from tests.support.combinations import thorough

pytestmark = thorough

ROOT = Path(__file__).resolve().parents[1]
TREES = ("benchmarks", "docs", "examples", "fpipe", "interop", "schedules", "tests")
BUILD = """if True:
    import sys
    from setuptools import build_meta

    out = sys.argv[1]  # setuptools changes sys.argv
    for build in (build_meta.build_sdist, build_meta.build_wheel, build_meta.build_editable):
        build(out)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The three, built in a copy, because setuptools writes into the source."""
    pytest.importorskip("setuptools", minversion="77")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("out")
    for path in ROOT.iterdir():
        if path.name in TREES:
            shutil.copytree(path, source / path.name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        elif path.is_file():
            shutil.copy(path, source)
    shutil.copytree(ROOT / ".ci", source / ".ci")
    command = [sys.executable, "-c", BUILD, str(out)]
    ended = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return source, out


def test_the_source_distribution_is_the_repository(built):
    source, out = built
    with tarfile.open(*out.glob("*.tar.gz")) as archive:
        archive.extractall(out, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # from 3.11.4 on
    unpacked = out / f"fpipe-{fpipe.__version__}"

    def files(folder):
        paths = [path.relative_to(folder) for path in folder.rglob("*") if path.is_symlink() or path.is_file()]
        return {path for path in paths if path.parts[0] in (*TREES, ".ci") or len(path.parts) == 1}

    made = {Path("PKG-INFO"), Path("setup.cfg")}
    assert files(unpacked) - made == {path for path in files(source) if path.name not in (".git", "gpu.json")}
    for folder in ("schedules", "interop"):
        assert (unpacked / "fpipe" / folder).readlink() == Path("..") / folder


def test_the_wheel_has_the_library_alone(built):
    _, out = built
    with zipfile.ZipFile(out / f"fpipe-{fpipe.__version__}-py3-none-any.whl") as wheel:
        names = wheel.namelist()
    assert {name.split("/")[0] for name in names} == {"fpipe", f"fpipe-{fpipe.__version__}.dist-info"}
    assert {"fpipe/py.typed", "fpipe/schedules/zb_v.py", "fpipe/tensorboard/server/static/index.js"} <= {*names}


def test_an_editable_install_finds_fpipe_and_no_other_folder(built, tmp_path):
    source, out = built
    with zipfile.ZipFile(*out.glob("*editable*.whl")) as wheel:
        wheel.extractall(tmp_path)
    code = f"""if True:
        import site, sys
        site.addsitedir({str(tmp_path)!r})
        from importlib.util import find_spec
        print([find_spec(name) is not None for name in {[*TREES, "fpipe.schedules.zb_v"]}])
        import fpipe.schedules
        print(fpipe.schedules.__file__)
    """
    shown = subprocess.run([sys.executable, "-ISc", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines() == [
        str([name == "fpipe" for name in TREES] + [True]).replace("'", ""),
        str(source / "fpipe" / "schedules" / "__init__.py"),
    ]
