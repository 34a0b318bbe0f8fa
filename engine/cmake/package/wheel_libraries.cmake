# Copies into a wheel, at its installation, the libraries that it brings, with their licences; removes what only a developer needs.

# A file of Debian belongs to a package, which has a file with its licence. Elsewhere somebody has to say where licences are.
function(copy_licence file)
  find_program(ms_dpkg_query dpkg-query)
  if(ms_dpkg_query)
    # Since /lib is a link to /usr/lib, the package may know the file by either name.
    string(REGEX REPLACE "^/usr/lib/" "/lib/" other "${file}")
    foreach(path IN ITEMS "${file}" "${other}")
      execute_process(COMMAND "${ms_dpkg_query}" -S "${path}" OUTPUT_VARIABLE owner ERROR_QUIET)
      string(REGEX MATCH "^[^:, ]+" package "${owner}")
      if(package)
        break()
      endif()
    endforeach()
  endif()
  set(licence "/usr/share/doc/${package}/copyright")
  if(NOT package OR NOT EXISTS "${licence}")
    message(FATAL_ERROR "the wheel would contain ${file}, and its licence is not found: build the wheel on Debian or Ubuntu, where "
      "/usr/share/doc/PACKAGE/copyright has it")
  endif()
  file(REAL_PATH "${licence}" licence)
  file(COPY_FILE "${licence}" "${ms_licences}/${package}.txt")
endfunction()

# The search does not go on below what it leaves out, so our own libraries are named.
file(GET_RUNTIME_DEPENDENCIES EXECUTABLES "${ms_program}"
  LIBRARIES "${ms_libraries}/libmoonshard.so" "${ms_libraries}/libmoonshard_lua.so" RESOLVED_DEPENDENCIES_VAR found
  UNRESOLVED_DEPENDENCIES_VAR missing PRE_EXCLUDE_REGEXES "${ms_of_the_system}" POST_EXCLUDE_REGEXES "/libmoonshard")
if(missing)
  message(FATAL_ERROR "libraries of the wheel are not found: ${missing}")
endif()
file(MAKE_DIRECTORY "${ms_licences}")
foreach(library IN LISTS found)
  cmake_path(GET library FILENAME name)
  file(REAL_PATH "${library}" real)
  file(COPY_FILE "${real}" "${ms_libraries}/${name}")
  copy_licence("${real}")
endforeach()
copy_licence("${ms_argparse}")

# A wheel has no links: of each library of ours the name under which it is loaded.
file(GLOB ours "${ms_libraries}/libmoonshard*.so")
foreach(link IN LISTS ours)
  file(REAL_PATH "${link}" real)
  file(GLOB names "${link}.[0-9]*")
  list(SORT names)
  list(GET names 0 loaded)
  file(RENAME "${real}" "${link}.whole")
  file(REMOVE ${names} "${link}")
  file(RENAME "${link}.whole" "${loaded}")
endforeach()
file(REMOVE_RECURSE "${ms_libraries}/cmake" "${ms_libraries}/pkgconfig" "${CMAKE_INSTALL_PREFIX}/include"
  "${CMAKE_INSTALL_PREFIX}/share/bash-completion" "${CMAKE_INSTALL_PREFIX}/share/zsh")
