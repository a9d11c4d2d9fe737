"""Single modules of a library, without the code that its packages run on import.

`import fla` loads transformers, takes ten seconds and re-registers transformers' "mamba2" configuration; `import mamba_ssm`
fails where its CUDA extension was not built, which its Triton kernels do not need. Python imports the packages above a
module first; here they are put in place unexecuted.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any, cast


class _Unexecuted(ModuleType):
    """A package that runs its own code once it is asked for a name that none of its submodules has brought.

    So a later `from fla.layers import ...` or `import mamba_ssm` finds what it would have found without us.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module '{self.__name__}' has no attribute '{name}'")
        # An ordinary module from now on, while it runs too: it imports itself.
        self.__class__ = ModuleType  # type: ignore[assignment]
        try:
            specification = cast(ModuleSpec, self.__spec__)
            assert specification.loader is not None
            specification.loader.exec_module(self)
        except BaseException:
            self.__class__ = _Unexecuted
            raise
        return getattr(self, name)


@cache
def import_submodule(module: str, distribution: str) -> ModuleType:
    """Import `module`, a module inside a package, without executing the packages above it.

    Args:
        module: its full name, like "fla.ops.gla".
        distribution: the installed distribution whose version the topmost package states as its `__version__`.

    Raises:
        ImportError: the library, or something that the module itself needs, is not installed or does not load.
    """
    parts = module.split(".")
    for end in range(1, len(parts)):
        name = ".".join(parts[:end])
        if name in sys.modules:
            continue
        specification = find_spec(name)
        if specification is None:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
        package = module_from_spec(specification)
        if end == 1:
            try:
                package.__dict__["__version__"] = version(distribution)
            except PackageNotFoundError:
                raise ModuleNotFoundError(f"{distribution} is not installed", name=name) from None
        package.__class__ = _Unexecuted
        sys.modules[name] = package
        if end > 1:
            setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], package)
    with warnings.catch_warnings():
        # fla warns where there is no GPU; whether there is one has been asked before, and is told in better words.
        warnings.simplefilter("ignore", UserWarning)
        return importlib.import_module(module)
