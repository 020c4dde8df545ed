# The ROCm build (gfx942) by ROCm's own hipcc. No CUDA source and no CUDA library takes part.
find_program(HIPCC hipcc HINTS $ENV{ROCM_PATH}/bin /opt/rocm/bin REQUIRED)
get_filename_component(rocm_root "${HIPCC}" REALPATH)
get_filename_component(rocm_root "${rocm_root}" DIRECTORY)
get_filename_component(rocm_root "${rocm_root}" DIRECTORY)

set(kernels ${CMAKE_CURRENT_BINARY_DIR}/kernels.hip.o)
file(GLOB kernel_headers CONFIGURE_DEPENDS include/jaxdp/*.h)
add_custom_command(
  OUTPUT ${kernels}
  COMMAND ${HIPCC} -x hip -std=c++20 -O3 -ffp-contract=off --offload-arch=gfx942 -DJAXDP_HIP
          -I${CMAKE_CURRENT_SOURCE_DIR}/include -fPIC -c ${CMAKE_CURRENT_SOURCE_DIR}/kernels.gpu.cc -o ${kernels}
  DEPENDS kernels.gpu.cc ${kernel_headers}
  VERBATIM)
nanobind_add_module(_rocm NOMINSIZE module_gpu.cc handlers_gpu.cc gpu_group.cc ${kernels})
target_compile_definitions(_rocm PRIVATE JAXDP_HIP JAXDP_MODULE=_rocm __HIP_PLATFORM_AMD__)
target_include_directories(_rocm SYSTEM PRIVATE ${XLA_INCLUDE} ${rocm_root}/include)
target_link_directories(_rocm PRIVATE ${rocm_root}/lib)
target_link_libraries(_rocm PRIVATE jaxdp_flags amdhip64)
install(TARGETS _rocm LIBRARY DESTINATION jaxdp)
