# What `cmake --install` puts where: libraries, headers, packages for CMake and pkg-config, the Lua files, the CLI.
include(CMakePackageConfigHelpers)

# (The Lua module itself goes with its target in bindings/, because its place decides how it finds the library.)
set(targets moonshard_shared)
if(TARGET moonshard_lua)
  list(APPEND targets moonshard_lua)
endif()
install(TARGETS ${targets} EXPORT moonshard
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/engine/include/moonshard DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  FILES_MATCHING PATTERN "*.h")
install(DIRECTORY ${PROJECT_SOURCE_DIR}/lua/ DESTINATION ${MOONSHARD_LUA_DIR}
  FILES_MATCHING PATTERN "*.lua")

# Recipes, and the text that they train on where no data= is given: sayings, if Debian's package fortunes is here.
# lua/moonshard/base/shipped.lua looks for both beside the Lua files.
install(DIRECTORY ${PROJECT_SOURCE_DIR}/recipes DESTINATION ${MOONSHARD_SHARE_DIR})
set(MOONSHARD_TEXT /usr/share/games/fortunes CACHE PATH "folder of the text files that are installed for recipes")
set(licence /usr/share/doc/fortunes/copyright)
if(EXISTS ${MOONSHARD_TEXT} AND EXISTS ${licence})
  install(DIRECTORY ${MOONSHARD_TEXT}/ DESTINATION ${MOONSHARD_SHARE_DIR}/text
    FILES_MATCHING REGEX "/[a-z-]+$" REGEX "/(ascii-art|drugs|ethnic|men-women)$" EXCLUDE)
  install(FILES ${licence} DESTINATION ${MOONSHARD_SHARE_DIR}/text RENAME licence.txt)
endif()

set(package ${CMAKE_INSTALL_LIBDIR}/cmake/moonshard)
install(EXPORT moonshard NAMESPACE moonshard:: FILE moonshardTargets.cmake DESTINATION ${package})
configure_package_config_file(${PROJECT_SOURCE_DIR}/engine/cmake/moonshardConfig.cmake.in
  ${PROJECT_BINARY_DIR}/package/moonshardConfig.cmake INSTALL_DESTINATION ${package})
# Before 1.0 a new minor version may change any interface.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/package/moonshardConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/package/moonshardConfig.cmake
  ${PROJECT_BINARY_DIR}/package/moonshardConfigVersion.cmake DESTINATION ${package})

set(modules moonshard)
if(TARGET moonshard_lua)
  list(APPEND modules moonshard-lua)
endif()
# Relative to the file itself, so that the tree may be installed under another prefix than it was configured for.
file(RELATIVE_PATH MS_PC_TO_PREFIX /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
string(REGEX REPLACE "/$" "" MS_PC_TO_PREFIX ${MS_PC_TO_PREFIX})
foreach(module IN LISTS modules)
  configure_file(${PROJECT_SOURCE_DIR}/engine/cmake/${module}.pc.in ${PROJECT_BINARY_DIR}/package/${module}.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/package/${module}.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endforeach()

# What a stock interpreter must be told, unless it looks there by itself (under /usr and /usr/local).
install(CODE "set(lua_dir \"\${CMAKE_INSTALL_PREFIX}/${MOONSHARD_LUA_DIR}\")
set(lua_c_dir \"\${CMAKE_INSTALL_PREFIX}/${MOONSHARD_LUA_CDIR}\")
if(NOT CMAKE_INSTALL_PREFIX MATCHES \"^/usr(/local)?$\")
  message(STATUS \"For require \\\"moonshard\\\" in a stock lua5.4, set:
export LUA_PATH='\${lua_dir}/?.lua;\${lua_dir}/?/init.lua;;'
export LUA_CPATH='\${lua_c_dir}/?.so;;'\")
endif()")
