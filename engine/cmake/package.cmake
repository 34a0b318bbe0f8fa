# Packages for users: `cpack` in a build folder makes a .deb for Debian, and `pip wheel .` a wheel (see pyproject.toml).

# Both say that the licence is the owner's to name.
if(MOONSHARD_WHEEL)
  include(package/wheel)
  return()
endif()

install(FILES ${PROJECT_SOURCE_DIR}/engine/cmake/package/licence.txt DESTINATION share/doc/moonshard RENAME copyright)
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME moonshard)
set(CPACK_PACKAGE_VENDOR "Moonshard")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "distributed training without Python")
set(CPACK_PACKAGE_DESCRIPTION
  "Tensors with a gradient tape, streams, collectives, optimizers and data parallelism in C; recipes,
communication hooks and overlap policies as Lua scripts.")
set(MOONSHARD_MAINTAINER "Moonshard <moonshard@localhost>" CACHE STRING "who maintains the .deb: Name <address>")
set(CPACK_DEBIAN_PACKAGE_MAINTAINER "${MOONSHARD_MAINTAINER}")
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_PACKAGE_DIRECTORY ${PROJECT_BINARY_DIR}/package)
# Read when a package is made, after the build.
configure_file(${PROJECT_SOURCE_DIR}/engine/cmake/package/deb.cmake.in ${PROJECT_BINARY_DIR}/package/deb.cmake @ONLY)
set(CPACK_PROJECT_CONFIG_FILE ${PROJECT_BINARY_DIR}/package/deb.cmake)
include(CPack)
