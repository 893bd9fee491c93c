"""How the C library of draws is built: a plain shared library, in a wheel for any Python on its platform.

Only the build imports this file. ctypes loads the library, so neither its name nor the wheel's depends on an interpreter.
"""

import os

from setuptools.command import bdist_wheel, build_ext


class BuildLibrary(build_ext.build_ext):
    """Builds ``package/_native.so``, which exports its functions and no Python module."""

    def get_ext_filename(self, fullname: str) -> str:
        """Where a library goes, without the interpreter's suffix."""
        return os.path.join(*fullname.split(".")) + ".so"

    def get_export_symbols(self, ext: object) -> list[str]:
        """No ``PyInit_`` function."""
        return []


class AnyPython(bdist_wheel.bdist_wheel):
    """Tags the wheel ``py3-none-PLATFORM``."""

    def get_tag(self) -> tuple[str, str, str]:
        """The tag: any Python 3, no ABI, this platform."""
        return "py3", "none", super().get_tag()[2]
