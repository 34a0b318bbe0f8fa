# What a wheel has beside the usual installation: the libraries that a system may lack, and the licence of each.

# Programs of a system have these, of the version that the wheel's tag names or a later one (manylinux: PEP 600).
set(MS_OF_THE_SYSTEM "^(ld-linux.*|lib(c|m|dl|rt|pthread|gcc_s|stdc\\+\\+))\\.so")

find_file(MS_ARGPARSE argparse.lua PATHS /usr/share/lua/5.4 /usr/local/share/lua/5.4 REQUIRED)
install(FILES ${PROJECT_SOURCE_DIR}/engine/cmake/package/licence.txt DESTINATION licences RENAME moonshard.txt)
# Debian's is a link to another folder.
file(REAL_PATH ${MS_ARGPARSE} MS_ARGPARSE_FILE)
install(FILES ${MS_ARGPARSE_FILE} DESTINATION ${MOONSHARD_LUA_DIR} RENAME argparse.lua)

install(CODE "
  set(ms_of_the_system [[${MS_OF_THE_SYSTEM}]])
  set(ms_program \"\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_BINDIR}/moonshard\")
  set(ms_libraries \"\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_LIBDIR}\")
  set(ms_licences \"\${CMAKE_INSTALL_PREFIX}/licences\")
  set(ms_argparse [[${MS_ARGPARSE_FILE}]])")
install(SCRIPT ${PROJECT_SOURCE_DIR}/engine/cmake/package/wheel_libraries.cmake)
