# ms_add_layer: the CMake target of one folder of the engine.

# ms_add_layer(NAME [DEPENDS lower...] [FOLDERS sub...] [BF16 file...] [LIBRARIES target...])
#
# Makes the object target moonshard_NAME from *.c of the current folder and of the subfolders FOLDERS. It is compiled against
# the layers in DEPENDS and nothing else; LIBRARIES are outside libraries that only this layer sees. Files in
# */isa/ are compiled once for each instruction set, with MS_ISA defined as the set's name; for avx512bf16, which differs from
# avx512 by a few instructions, only those that BF16 names.
# A folder without sources is an interface target, so that the layers above can already name it.
function(ms_add_layer name)
  cmake_parse_arguments(layer "" "" "DEPENDS;FOLDERS;BF16;LIBRARIES" ${ARGN})
  set(patterns *.c)
  foreach(folder IN LISTS layer_FOLDERS)
    list(APPEND patterns ${folder}/*.c)
  endforeach()
  file(GLOB sources CONFIGURE_DEPENDS ${patterns})
  file(GLOB isa_sources CONFIGURE_DEPENDS */isa/*.c)
  ms_add_images(sources)

  set(uses moonshard_settings ${layer_LIBRARIES})
  foreach(lower IN LISTS layer_DEPENDS)
    list(APPEND uses moonshard_${lower})
  endforeach()

  set(parts "")
  if(sources)
    ms_add_objects(moonshard_${name} "${sources}" "${uses}")
    list(APPEND parts moonshard_${name})
  else()
    add_library(moonshard_${name} INTERFACE)
  endif()
  foreach(isa IN LISTS MS_ISA_LIST)
    if(isa STREQUAL avx512bf16)
      list(TRANSFORM layer_BF16 PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/cpu/isa/ OUTPUT_VARIABLE isa_sources)
    endif()
    if(isa_sources)
      ms_add_objects(moonshard_${name}_${isa} "${isa_sources}" "${uses}")
      target_compile_definitions(moonshard_${name}_${isa} PRIVATE MS_ISA=${isa})
      target_compile_options(moonshard_${name}_${isa} PRIVATE ${MS_ISA_FLAGS_all} ${MS_ISA_FLAGS_${isa}})
      list(APPEND parts moonshard_${name}_${isa})
    endif()
  endforeach()
  # What the whole library is put together from, and what it must link.
  set_property(GLOBAL APPEND PROPERTY MS_ENGINE_PARTS ${parts})
  set_property(GLOBAL APPEND PROPERTY MS_ENGINE_LIBRARIES ${layer_LIBRARIES})
endfunction()

# One object target with the engine's include paths.
function(ms_add_objects target sources uses)
  add_library(${target} OBJECT ${sources})
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/engine/include ${PROJECT_SOURCE_DIR}/engine)
  # Compile requirements only: object targets are linked once, in the whole library.
  target_link_libraries(${target} PRIVATE ${uses})
endfunction()
