"""The packages, which lie in two places: src/, and kernels/ as `farstate.kernels`. All else is in pyproject.toml."""

from setuptools import find_packages, setup

setup(package_dir={"": "src", "farstate.kernels": "kernels"}, packages=[*find_packages("src"), "farstate.kernels"])
