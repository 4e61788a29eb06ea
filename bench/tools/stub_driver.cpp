// A CUDA driver that computes nothing: what Triton's launcher calls, for bench/tools/stub_driver.py. It looks like one
// H100, holds cuTensorMapEncodeTiled's arguments against that function's rules, and counts launches and wrong maps.
#include <cuda.h>

#include <cstdint>
#include <cstdio>
#include <string>

namespace {

long long g_launches, g_maps;
std::string g_complaints;

// Rules of cuTensorMapEncodeTiled (CUDA driver API, "Tensor map object management").
const char* complaint(const void* map, CUtensorMapDataType type, cuuint32_t rank, const void* address,
                      const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t* box,
                      CUtensorMapSwizzle swizzle) {
  static const unsigned kSizes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
  if (static_cast<unsigned>(type) >= sizeof kSizes / sizeof *kSizes) return "data type";
  const unsigned item = kSizes[type];
  if (reinterpret_cast<std::uintptr_t>(map) % 64) return "alignment of the map";
  if (reinterpret_cast<std::uintptr_t>(address) % 16) return "global address";
  if (rank < 1 || rank > 5) return "rank";
  for (unsigned i = 0; i < rank; ++i) {
    if (dims[i] == 0 || dims[i] > (1ull << 32)) return "size of a dim";
    if (box[i] == 0 || box[i] > 256) return "size of a box";
  }
  for (unsigned i = 0; i + 1 < rank; ++i) {
    if (strides[i] % 16 || strides[i] >= (1ull << 40)) return "stride";
    if (strides[i] < dims[0] * item && dims[1] > 1) return "stride shorter than a row";
  }
  const unsigned inner = box[0] * item;
  if (inner % 16) return "bytes of a box's row";
  const unsigned limit = swizzle == CU_TENSOR_MAP_SWIZZLE_32B    ? 32
                         : swizzle == CU_TENSOR_MAP_SWIZZLE_64B  ? 64
                         : swizzle == CU_TENSOR_MAP_SWIZZLE_128B ? 128
                                                                 : 1u << 20;
  return inner > limit ? "bytes of a box's row over the swizzle" : nullptr;
}

CUresult refused(const std::string& what) {
  g_complaints += what + "\n";
  return CUDA_ERROR_INVALID_VALUE;
}

}  // namespace

extern "C" {

long long stub_launches() { return g_launches; }
long long stub_maps() { return g_maps; }
const char* stub_complaints() { return g_complaints.c_str(); }

CUresult cuGetErrorString(CUresult, const char** text) { return *text = "refused by the stub", CUDA_SUCCESS; }
CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) { return *version = 13000, CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int* count) { return *count = 1, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* device, int) { return *device = 0, CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute what, CUdevice) {
  switch (static_cast<int>(what)) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      return *value = 9, CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      return *value = 0, CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
      return *value = 232448, CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
      return *value = 233472, CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
      return *value = 65536, CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      return *value = 132, CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
      return *value = 32, CUDA_SUCCESS;
    default:
      return *value = 1, CUDA_SUCCESS;
  }
}
CUresult cuCtxGetCurrent(CUcontext* context) { return *context = reinterpret_cast<CUcontext>(1), CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice* device) { return *device = 0, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) { return cuCtxGetCurrent(context); }
CUresult cuCtxGetLimit(size_t* value, CUlimit) { return *value = 0, CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus* status) {
  return *status = CU_STREAM_CAPTURE_STATUS_NONE, CUDA_SUCCESS;
}
CUresult cuModuleLoadData(CUmodule* module, const void*) {
  return *module = reinterpret_cast<CUmodule>(2), CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char*) {
  return *function = reinterpret_cast<CUfunction>(3), CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute what, CUfunction) {
  *value = what == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : what == CU_FUNC_ATTRIBUTE_NUM_REGS ? 168 : 0;
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int* count, CUfunction, const CUlaunchConfig*) {
  return *count = 1, CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void* data, CUpointer_attribute, CUdeviceptr address) {
  return *static_cast<CUdeviceptr*>(data) = address, CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction, void**, void**) {
  ++g_launches;
  const unsigned long long threads = 1ull * config->blockDimX * config->blockDimY * config->blockDimZ;
  if (!config->gridDimX || !config->gridDimY || !config->gridDimZ) return refused("launch: an empty grid");
  if (config->gridDimY > 65535 || config->gridDimZ > 65535) return refused("launch: grid over the device's");
  if (threads > 1024 || config->sharedMemBytes > 232448) return refused("launch: more than a program may have");
  return CUDA_SUCCESS;
}
CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t* box,
                                const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  ++g_maps;
  const char* wrong = complaint(map, type, rank, address, dims, strides, box, swizzle);
  return wrong ? refused(std::string("tensor map: ") + wrong) : CUDA_SUCCESS;
}
CUresult cuTensorMapEncodeIm2col(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const int*, const int*, cuuint32_t, cuuint32_t, const cuuint32_t*,
                                 CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                 CUtensorMapFloatOOBfill) {
  return refused("tensor map: im2col is not used here");
}

}  // extern "C"
