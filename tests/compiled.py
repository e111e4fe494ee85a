"""Marks for what needs native kernels; nothing else does."""

import pytest

from pipeline.native.library import NativeError, compiler


def _missing() -> bool:
    try:
        compiler()
    except NativeError:
        return True
    return False


NATIVE = pytest.mark.skipif(_missing(), reason="no C++ compiler: `make compiler` installs one")
KERNELS = ["torch", pytest.param("native", marks=NATIVE)]
