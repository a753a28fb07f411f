"""The source distribution keeps the links of fpipe/; all else is in pyproject.toml."""

from collections.abc import Iterable
from pathlib import Path

from setuptools import setup
from setuptools.command.sdist import sdist

LINKS = [path for path in Path("fpipe").iterdir() if path.is_symlink()]


class Sdist(sdist):
    def make_release_tree(self, base_dir: str, files: Iterable[str]) -> None:
        super().make_release_tree(base_dir, [file for file in files if not {*LINKS} & {*Path(file).parents}])
        for link in LINKS:
            Path(base_dir, link).symlink_to(link.readlink())


setup(cmdclass={"sdist": Sdist})
