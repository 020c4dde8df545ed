// The names of the GPU runtime's host functions, one spelling for CUDA and HIP.
#pragma once

#include <cstddef>

#if defined(JAXDP_CUDA)
#include <cuda_runtime.h>
#define JAXDP_GPU_NAME(name) cuda##name
#elif defined(JAXDP_HIP)
#include <hip/hip_runtime.h>
#define JAXDP_GPU_NAME(name) hip##name
#endif

namespace jaxdp::gpu {

using Error = JAXDP_GPU_NAME(Error_t);
using Stream = JAXDP_GPU_NAME(Stream_t);
using IpcHandle = JAXDP_GPU_NAME(IpcMemHandle_t);

#if defined(JAXDP_CUDA)
inline constexpr const char* kPlatform = "CUDA";
#else
inline constexpr const char* kPlatform = "ROCM";
#endif
inline constexpr Error kSuccess = JAXDP_GPU_NAME(Success);

inline const char* message(Error error) { return JAXDP_GPU_NAME(GetErrorString)(error); }
inline Error last_error() { return JAXDP_GPU_NAME(GetLastError)(); }
inline Error set_device(int device) { return JAXDP_GPU_NAME(SetDevice)(device); }
inline Error get_device(int* device) { return JAXDP_GPU_NAME(GetDevice)(device); }
inline Error synchronize() { return JAXDP_GPU_NAME(DeviceSynchronize)(); }
inline Error allocate(void** pointer, std::size_t bytes) { return JAXDP_GPU_NAME(Malloc)(pointer, bytes); }
inline Error release(void* pointer) { return JAXDP_GPU_NAME(Free)(pointer); }
inline Error zero(void* pointer, std::size_t bytes) { return JAXDP_GPU_NAME(Memset)(pointer, 0, bytes); }
inline Error copy_async(void* to, const void* from, std::size_t bytes, Stream stream) {
  return JAXDP_GPU_NAME(MemcpyAsync)(to, from, bytes, JAXDP_GPU_NAME(MemcpyDefault), stream);
}
inline Error copy(void* to, const void* from, std::size_t bytes) {
  return JAXDP_GPU_NAME(Memcpy)(to, from, bytes, JAXDP_GPU_NAME(MemcpyDefault));
}
inline Error create_stream(Stream* stream) {
  return JAXDP_GPU_NAME(StreamCreateWithFlags)(stream, JAXDP_GPU_NAME(StreamNonBlocking));
}
inline Error destroy_stream(Stream stream) { return JAXDP_GPU_NAME(StreamDestroy)(stream); }
inline Error synchronize(Stream stream) { return JAXDP_GPU_NAME(StreamSynchronize)(stream); }

// Host memory that the device writes and the host reads while kernels run.
inline Error allocate_pinned(void** pointer, std::size_t bytes) {
#if defined(JAXDP_CUDA)
  return cudaHostAlloc(pointer, bytes, cudaHostAllocMapped | cudaHostAllocPortable);
#else
  return hipHostMalloc(pointer, bytes, hipHostMallocMapped | hipHostMallocPortable | hipHostMallocCoherent);
#endif
}
inline Error release_pinned(void* pointer) {
#if defined(JAXDP_CUDA)
  return cudaFreeHost(pointer);
#else
  return hipHostFree(pointer);
#endif
}

// Memory for the words that peers poll. AMD documents that system-scope atomics on ordinary device
// memory are not coherent across the system; there it must be uncached.
inline Error allocate_words(void** pointer, std::size_t bytes) {
#if defined(JAXDP_CUDA)
  return cudaMalloc(pointer, bytes);
#else
  constexpr unsigned kUncached = 0x3;  // hipDeviceMallocUncached, absent from older headers
  return hipExtMallocWithFlags(pointer, bytes, kUncached);
#endif
}

// Lets the current device read and write `peer`'s memory. Success if it already may.
inline Error enable_peer(int peer) {
  const Error error = JAXDP_GPU_NAME(DeviceEnablePeerAccess)(peer, 0);
  if (error != JAXDP_GPU_NAME(ErrorPeerAccessAlreadyEnabled)) return error;
  last_error();
  return kSuccess;
}
inline Error can_access(int* answer, int device, int peer) {
  return JAXDP_GPU_NAME(DeviceCanAccessPeer)(answer, device, peer);
}

inline Error export_handle(IpcHandle* handle, void* pointer) { return JAXDP_GPU_NAME(IpcGetMemHandle)(handle, pointer); }
inline Error open_handle(void** pointer, const IpcHandle& handle) {
  return JAXDP_GPU_NAME(IpcOpenMemHandle)(pointer, handle, JAXDP_GPU_NAME(IpcMemLazyEnablePeerAccess));
}
inline Error close_handle(void* pointer) { return JAXDP_GPU_NAME(IpcCloseMemHandle)(pointer); }

// Makes the current device load a kernel now.
inline Error load_kernel(const void* kernel) {
  JAXDP_GPU_NAME(FuncAttributes) attributes;
  return JAXDP_GPU_NAME(FuncGetAttributes)(&attributes, kernel);
}

inline Error count_multiprocessors(int* count, int device) {
#if defined(JAXDP_CUDA)
  return cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
#else
  return hipDeviceGetAttribute(count, hipDeviceAttributeMultiprocessorCount, device);
#endif
}

inline Error count_devices(int* count) { return JAXDP_GPU_NAME(GetDeviceCount)(count); }

}  // namespace jaxdp::gpu
