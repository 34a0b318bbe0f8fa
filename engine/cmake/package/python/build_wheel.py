"""The build backend of the wheel: scikit-build-core, with the tag of the C library of this machine."""

import platform

from scikit_build_core import build as backend

get_requires_for_build_wheel = backend.get_requires_for_build_wheel
get_requires_for_build_sdist = backend.get_requires_for_build_sdist
build_sdist = backend.build_sdist


def tagged(settings):
    # The program and its libraries were linked here, so they run where the C library is this one or a later one (PEP 600). They
    # are no module of Python: any version of it will do.
    name, version = platform.libc_ver()
    if name != "glibc":
        raise SystemExit("moonshard: a wheel can be built where the C library is glibc")
    tag = "py3-none-manylinux_{}_{}".format("_".join(version.split(".")[:2]), platform.machine())
    return {"wheel.tags": [tag], **(settings or {})}


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    return backend.prepare_metadata_for_build_wheel(metadata_directory, tagged(config_settings))


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    return backend.build_wheel(wheel_directory, tagged(config_settings), metadata_directory)
