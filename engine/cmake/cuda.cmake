# Kernels for GPUs: *.cu in folders named cuda, compiled to machine code that the library carries along.

# sm_80 and sm_90, and PTX for what is newer. No kernel asks which of them it is compiled for, so one translation to PTX, which
# takes half of the time, serves both: the machine code is the same as from two. Each file is one image: fat binaries of files are
# independent of each other.
set(MS_NVCC_FLAGS -std=c++17 -O3 -fatbin --compress-mode=size -gencode arch=compute_80,code=[sm_80,sm_90,compute_80])
# These promise the same bits as the CPU: a fused multiply-add rounds once, two instructions round twice.
set(MS_CUDA_EXACT random codec fp8 comm_reduce)

# ms_add_images(VARIABLE): compiles cuda/*.cu of this layer, and appends to VARIABLE the C file with the images. Without a
# toolkit, and under a sanitizer, whose builds run kernels on the host, each image is one byte, 0.
function(ms_add_images variable)
  file(GLOB kernels CONFIGURE_DEPENDS cuda/*.cu)
  set(text "/* Made by engine/cmake/cuda.cmake. */\n")
  set(images "")
  foreach(kernel IN LISTS kernels)
    cmake_path(GET kernel STEM stem)
    set_property(GLOBAL APPEND PROPERTY MS_CUDA_KERNELS ${kernel})
    if(NOT MS_NVCC)
      string(APPEND text "const unsigned char ms_cuda_image_${stem}[1];\n")
      continue()
    endif()
    set(image ${CMAKE_CURRENT_BINARY_DIR}/${stem}.fatbin)
    set(flags ${MS_NVCC_FLAGS})
    if(stem IN_LIST MS_CUDA_EXACT)
      list(APPEND flags -fmad=false)
    endif()
    # Of the compiler's own files the PTX stays, which lint.accesses reads.
    add_custom_command(OUTPUT ${image} BYPRODUCTS ${image}.ptx
      COMMAND ${CMAKE_COMMAND} -E make_directory ${image}.kept
      COMMAND ${MS_NVCC} ${flags} -Xptxas -v --keep --keep-dir ${image}.kept -MD -MF ${image}.d -MT ${image}
        -I ${PROJECT_SOURCE_DIR}/engine -I ${PROJECT_SOURCE_DIR}/engine/include -o ${image} ${kernel} 2> ${image}.log
        || ${CMAKE_COMMAND} -E cat ${image}.log && test -f ${image}
      COMMAND ${CMAKE_COMMAND} -E rename ${image}.kept/${stem}.ptx ${image}.ptx
      COMMAND ${CMAKE_COMMAND} -E rm -r ${image}.kept
      DEPENDS ${kernel} DEPFILE ${image}.d COMMENT "Kernels of ${stem}.cu" VERBATIM)
    list(APPEND images ${image})
    string(APPEND text "__asm__(\".section .rodata\\n.balign 64\\n.global ms_cuda_image_${stem}\\n.hidden ms_cuda_image_${stem}\\n\"\n"
      "        \"ms_cuda_image_${stem}:\\n.incbin \\\"${image}\\\"\\n.byte 0\\n.text\\n\");\n")
  endforeach()
  if(NOT kernels)
    return()
  endif()
  set(source ${CMAKE_CURRENT_BINARY_DIR}/images.c)
  file(CONFIGURE OUTPUT ${source} CONTENT "${text}" @ONLY)
  set_source_files_properties(${source} PROPERTIES OBJECT_DEPENDS "${images}" COMPILE_OPTIONS "-Wno-missing-variable-declarations;-Wno-pedantic")
  list(APPEND ${variable} ${source})
  set(${variable} ${${variable}} PARENT_SCOPE)
endfunction()
