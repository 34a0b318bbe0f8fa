# Compiler settings of every Moonshard target, carried by the interface target moonshard_settings.

set(MOONSHARD_SANITIZE "" CACHE STRING "empty, \"address,undefined\" or \"thread\"")

# Warnings of compilers that CI does not run must not stop a user's build; those of the one it runs must stop ours.
set(werror OFF)
if(CMAKE_C_COMPILER_ID STREQUAL "GNU" AND CMAKE_C_COMPILER_VERSION VERSION_GREATER_EQUAL 12
   AND CMAKE_C_COMPILER_VERSION VERSION_LESS 13)
  set(werror ON)
endif()
option(MOONSHARD_WERROR "make warnings errors (default: ON with gcc 12, which CI runs)" ${werror})

# A compiler cache, where there is one: a build in another folder finds what is the same.
find_program(MS_CCACHE ccache)
mark_as_advanced(MS_CCACHE)
if(MS_CCACHE AND NOT CMAKE_C_COMPILER_LAUNCHER)
  set(CMAKE_C_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} ${MS_CCACHE})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_C_COMPILER_LAUNCHER})
endif()

set(CMAKE_C_STANDARD 17)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_C_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_C_VISIBILITY_PRESET hidden)
# The build tree can be moved or mounted elsewhere: its libraries are found relative to the file that needs them.
set(CMAKE_BUILD_RPATH_USE_ORIGIN ON)
# In a wheel the program's folder of libraries is also the one for what oneDNN needs: RPATH, unlike RUNPATH, holds for all that a
# file loads. MPI modules stay outside, since an MPI is of the system.
if(MOONSHARD_WHEEL)
  add_link_options(-Wl,--disable-new-dtags)
endif()

add_library(moonshard_settings INTERFACE)
target_compile_definitions(moonshard_settings INTERFACE _GNU_SOURCE)
target_compile_options(moonshard_settings INTERFACE
  -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wformat-security -Wvla -Wcast-qual
  $<$<BOOL:${MOONSHARD_WERROR}>:-Werror>
  -fno-semantic-interposition)

set(MS_ISA_OPTIMIZATION -O3)
if(MOONSHARD_SANITIZE)
  target_compile_definitions(moonshard_settings INTERFACE MS_SANITIZE=1)
  target_compile_options(moonshard_settings INTERFACE
    -fsanitize=${MOONSHARD_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -g1)
  target_link_options(moonshard_settings INTERFACE -fsanitize=${MOONSHARD_SANITIZE})
  set(MS_ISA_OPTIMIZATION -O1)   # more takes minutes to compile with instrumentation
else()
  # A symbol that no library provides stops the link here, not a user's program later. (The sanitizers' own symbols
  # come from the executable, so their builds go without.)
  set(MS_LINK_COMPLETE -Wl,-z,defs)
endif()

# One compilation of engine/*/cpu/isa/*.c for each instruction set; the engine picks one at run time.
set(MOONSHARD_ISA avx512 CACHE STRING
  "the highest instruction set that kernels are compiled for: portable, avx2 or avx512; a lower one saves time, most under a sanitizer")
set_property(CACHE MOONSHARD_ISA PROPERTY STRINGS portable avx2 avx512)
if(NOT MOONSHARD_ISA MATCHES "^(portable|avx2|avx512)$")
  message(FATAL_ERROR "MOONSHARD_ISA is \"${MOONSHARD_ISA}\": it must be portable, avx2 or avx512.")
endif()
set(MS_ISA_LIST portable)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$" AND NOT MOONSHARD_ISA STREQUAL "portable")
  list(APPEND MS_ISA_LIST avx2)
  target_compile_definitions(moonshard_settings INTERFACE MS_WITH_AVX2=1)
  if(MOONSHARD_ISA STREQUAL "avx512")
    list(APPEND MS_ISA_LIST avx512 avx512bf16)
    target_compile_definitions(moonshard_settings INTERFACE MS_WITH_AVX512=1)
  endif()
endif()
set(MS_ISA_FLAGS_portable "")
set(MS_ISA_FLAGS_avx2 -mavx2 -mfma -mf16c -mbmi2)
set(MS_ISA_FLAGS_avx512 ${MS_ISA_FLAGS_avx2}
  -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512)
set(MS_ISA_FLAGS_avx512bf16 ${MS_ISA_FLAGS_avx512} -mavx512bf16)
# Contraction to fused multiply-add is wanted here and only here: the kernels state their own order of additions.
# Vectors wider than the registers are passed to inlined functions only, so their calling convention (-Wpsabi) never matters.
set(MS_ISA_FLAGS_all ${MS_ISA_OPTIMIZATION} -fno-math-errno -fno-trapping-math -ffp-contract=fast -Wno-psabi)
