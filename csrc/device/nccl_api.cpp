#include "device/nccl_api.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <mutex>

#include "base/error.h"

namespace axo {
namespace {

#include "memory/number_formats.inc"

LibraryRequest request_for(GpuVendor vendor, const std::vector<std::string>& folders) {
  LibraryRequest request;
  if (vendor == GpuVendor::cuda) {
    request.stem = "libnccl.so";
    request.names = {"libnccl.so.2", "libnccl.so"};
    request.wheel_folders = {"nvidia/nccl/lib"};
  } else {
    request.stem = "librccl.so";
    request.names = {"librccl.so.1", "librccl.so"};
    request.wheel_folders = {"torch/lib", "_rocm_sdk_libraries/lib"};
  }
  if (const char* path = std::getenv("AXO_NCCL_LIBRARY")) request.override_path = path;
  request.override_variable = "AXO_NCCL_LIBRARY";
  request.folders = folders;
  return request;
}

// Bytes of ncclConfig_t in `version`: up to the first field that is newer, padded as the compiler pads.
std::size_t config_bytes(int version) {
  static const struct {
    int since;  // the first version that has the field at `offset`
    std::size_t offset;
  } kFields[] = {
      {21700, offsetof(NcclConfig, cgaClusterSize)},      {21800, offsetof(NcclConfig, splitShare)},
      {22600, offsetof(NcclConfig, trafficClass)},        {22700, offsetof(NcclConfig, commName)},
      {22800, offsetof(NcclConfig, nChannelsPerNetPeer)}, {22900, offsetof(NcclConfig, graphUsageMode)},
      {23000, offsetof(NcclConfig, maxP2pPeers)},         {23100, offsetof(NcclConfig, graphStreamOrdering)},
      {23200, offsetof(NcclConfig, nvlsHostMode)},
  };
  for (const auto& field : kFields) {
    if (version < field.since) return (field.offset + alignof(NcclConfig) - 1) & ~(alignof(NcclConfig) - 1);
  }
  return sizeof(NcclConfig);
}

}  // namespace

NcclConfig make_nccl_config(int running_version) {
  const int version = std::min(running_version, kNcclNewestKnown);
  NcclConfig config;
  config.size = config_bytes(version);
  config.version = static_cast<unsigned>(version);
  return config;
}

std::shared_ptr<const NcclApi> NcclApi::open(GpuVendor vendor, const std::vector<std::string>& folders) {
  static std::mutex mutex;  // ranks that are threads: the second comes when the first has set the variable
  std::lock_guard<std::mutex> lock(mutex);
  return std::shared_ptr<const NcclApi>(new NcclApi(vendor, DynamicLibrary::open(request_for(vendor, folders))));
}

NcclApi::NcclApi(GpuVendor vendor, DynamicLibrary library) : vendor_(vendor), library_(std::move(library)) {
  library_.load(&fn_.GetErrorString, "ncclGetErrorString");
  library_.load(&fn_.GetVersion, "ncclGetVersion");
  check(fn_.GetVersion(&version_), "ncclGetVersion");
  AXO_CHECK(version_ >= kNcclOldest, ("version of " + path()).c_str(), version_text(), "2.18 or newer");
#define AXO_NCCL_LOAD(name, arguments) library_.load(&fn_.name, "nccl" #name);
  AXO_NCCL_REQUIRED(AXO_NCCL_LOAD)
#undef AXO_NCCL_LOAD
#define AXO_NCCL_LOAD(name, arguments) library_.try_load(&fn_.name, "nccl" #name);
  AXO_NCCL_OPTIONAL(AXO_NCCL_LOAD)
#undef AXO_NCCL_LOAD
  if (!fn_.AlltoAll) library_.try_load(&fn_.AlltoAll, "ncclAllToAll");  // RCCL's older name
  library_.try_load(&fn_.GetLastError, "ncclGetLastError");
  if (vendor_ == GpuVendor::hip && version_ >= 22200 && version_ < 22300) setenv("RCCL_MSCCL_ENABLE", "0", 0);
  if (vendor_ == GpuVendor::hip || version_ < 22600) return;
  if (version_ >= 23100) {
    orders_launches_ = true;  // by the configuration
    return;
  }
  constexpr const char* kVariable = "NCCL_LAUNCH_ORDER_IMPLICIT";
  if (!library_.was_loaded()) setenv(kVariable, "1", /*overwrite=*/0);
  const char* order = std::getenv(kVariable);
  orders_launches_ = order != nullptr && std::strcmp(order, "1") == 0;
}

std::string NcclApi::version_text() const {
  return std::to_string(version_ / 10000) + "." + std::to_string(version_ / 100 % 100) + "." +
         std::to_string(version_ % 100);
}

std::string NcclApi::error_text(const char* function, int result, NcclComm comm) const {
  const char* text = fn_.GetErrorString(result);
  std::string message =
      std::string(function) + ": " + (text ? text : "unknown error") + " (" + std::to_string(result) + ")";
  const char* last = fn_.GetLastError ? fn_.GetLastError(comm) : nullptr;
  if (last && *last) message += std::string(": ") + last;
  return message;
}

void NcclApi::check(int result, const char* function, NcclComm comm) const {
  if (result != kNcclSuccess) throw Error(error_text(function, result, comm));
}

NcclElements nccl_moved(DType dtype, std::size_t count) {
  static constexpr NcclType kTypes[] = {kNcclFloat64, kNcclFloat32, kNcclBfloat16,
                                        kNcclFloat16, kNcclInt64,   kNcclInt32};  // of the first dtypes, by code
  static_assert(static_cast<std::size_t>(DType::int32) + 1 == std::size(kTypes));
  const auto code = static_cast<std::size_t>(dtype);
  if (code < std::size(kTypes)) return {kTypes[code], count};
  return {kNcclUint8, count * item_size(dtype)};
}

NcclType nccl_reduced(const char* what, DType dtype, ReduceOp op) {
  const bool bits = op == ReduceOp::bit_and || op == ReduceOp::bit_or || op == ReduceOp::bit_xor;
  const bool boolean = dtype == DType::boolean;
  const bool possible =
      can_reduce(dtype, op) && dtype != DType::int16 && (!bits || boolean) && !(boolean && op == ReduceOp::bit_xor);
  if (!possible) {
    throw Error(std::string(what) + ": the GPU transport has no " + name_of(op) + " on " + name_of(dtype) +
                "; reduce another dtype, or move the tensor to the CPU");
  }
  return dtype == DType::int8 ? kNcclInt8 : nccl_moved(dtype, 0).type;
}

NcclOp nccl_op(DType dtype, ReduceOp op) {
  // A bool is a byte of 0 or 1: "or" is the maximum, "and" the minimum, and a sum that stays a bool is an "or".
  const bool boolean = dtype == DType::boolean;
  switch (op) {
    case ReduceOp::sum:
      return boolean ? kNcclMax : kNcclSum;
    case ReduceOp::avg:
      return kNcclAvg;
    case ReduceOp::product:
      return boolean ? kNcclMin : kNcclProd;
    case ReduceOp::min:
    case ReduceOp::bit_and:
      return kNcclMin;
    default:
      return kNcclMax;
  }
}

NcclScalar::NcclScalar(DType dtype, double value) {
  const auto put = [&](auto element) { std::memcpy(bytes, &element, sizeof element); };
  switch (dtype) {
    case DType::float64:
      put(value);
      break;
    case DType::float32:
      put(static_cast<float>(value));
      break;
    case DType::bfloat16:
      put(BFloat16::narrow(static_cast<float>(value)));
      break;
    case DType::float16:
      put(Float16::narrow(static_cast<float>(value)));
      break;
    default:
      throw Error(std::string("a scaled sum: got ") + name_of(dtype) +
                  ", expected float64, float32, bfloat16 or float16");
  }
}

}  // namespace axo
