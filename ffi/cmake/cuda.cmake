# The CUDA build (sm_90): kernels by nvcc, everything else by the host compiler.
find_program(NVCC nvcc HINTS /usr/local/cuda/bin REQUIRED)
get_filename_component(cuda_root "${NVCC}" REALPATH)
get_filename_component(cuda_root "${cuda_root}" DIRECTORY)
get_filename_component(cuda_root "${cuda_root}" DIRECTORY)
set(JAXDP_CUDA_ARCHITECTURE sm_90 CACHE STRING "what nvcc compiles for")

set(kernels ${CMAKE_CURRENT_BINARY_DIR}/kernels.cuda.o)
file(GLOB kernel_headers CONFIGURE_DEPENDS include/jaxdp/*.h)
add_custom_command(
  OUTPUT ${kernels}
  COMMAND ${NVCC} -std=c++20 -O3 --fmad=false -arch=${JAXDP_CUDA_ARCHITECTURE} -x cu -DJAXDP_CUDA
          -I${CMAKE_CURRENT_SOURCE_DIR}/include -Xcompiler -fPIC -c ${CMAKE_CURRENT_SOURCE_DIR}/kernels.gpu.cc -o ${kernels}
  DEPENDS kernels.gpu.cc ${kernel_headers}
  VERBATIM)
nanobind_add_module(_cuda NOMINSIZE module_gpu.cc handlers_gpu.cc gpu_group.cc ${kernels})
target_compile_definitions(_cuda PRIVATE JAXDP_CUDA JAXDP_MODULE=_cuda)
target_include_directories(_cuda SYSTEM PRIVATE ${XLA_INCLUDE} ${cuda_root}/include)
target_link_directories(_cuda PRIVATE ${cuda_root}/lib64)
# The runtime is linked in: the process may hold another version of the shared one.
target_link_libraries(_cuda PRIVATE jaxdp_flags cudart_static dl rt pthread)
install(TARGETS _cuda LIBRARY DESTINATION jaxdp)
