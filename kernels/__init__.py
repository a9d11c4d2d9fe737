"""Triton kernels; each stands beside a torch definition of the same function in `farstate.ops`.

Installed as `farstate.kernels`, and under no other name: the folder `kernels` at the top of the repository would hide the
package of that name on PyPI, for which transformers looks, from a Python started there. Such an import gets that package, or
an empty namespace where there is none, which transformers takes for absent.
"""

if __name__ == "kernels":
    import sys
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec
    from pathlib import Path

    _here = Path(__file__).resolve().parent.parent
    _spec = PathFinder.find_spec(__name__, [entry for entry in sys.path if Path(entry).resolve() != _here])
    if _spec is None or _spec.loader is None:
        __path__: list[str] = []
        del __file__
    else:
        sys.modules[__name__] = module_from_spec(_spec)
        _spec.loader.exec_module(sys.modules[__name__])
