// The GPU runtime as a table of functions opened at run time: CUDA and HIP through one set of names.
//
// No toolkit is needed to build: the types are declared here. The plain calls differ by prefix only (cudaEventRecord,
// hipEventRecord) and their flags have equal values. Three differ more and are wrapped: capture_info (7 arguments in
// CUDA 13, 6 in CUDA 12, 3 in HIP), wait_value / write_value (CUDA's driver API only), and device_uuid (CUDA's driver
// API, HIP's runtime). Structs and attribute numbers differ between the vendors and between versions, so none are used.
//
// All functions throw Error("cudaEventRecord: invalid resource handle (400)") unless they say otherwise; all are safe
// to call from any thread. A stream of value null is the device's default stream.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "device/dynamic_library.h"

namespace axo {

enum class GpuVendor { cuda, hip };
const char* name_of(GpuVendor vendor);  // "CUDA", "HIP"

using GpuStream = void*;
using GpuEvent = void*;

inline constexpr int kGpuSuccess = 0;
inline constexpr int kGpuNotReady = 600;
inline constexpr int kFirstCaptureError = 900;     // StreamCaptureUnsupported
inline constexpr int kLastCaptureError = 907;      // CapturedEvent
inline constexpr unsigned kStreamNonBlocking = 1;  // no implicit order against the default stream
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr int kMemcpyDefault = 4;      // the direction follows from the addresses
inline constexpr unsigned kWaitValueGeq = 0;  // int32(*address - value) >= 0, cyclic
inline constexpr int kCaptureModeRelaxed = 2;

enum class CaptureStatus : int { none = 0, active = 1, invalidated = 2 };

// Whether a stream records into a graph, and into which.
struct Capture {
  CaptureStatus status = CaptureStatus::none;
  unsigned long long id = 0;  // 0 when none
  bool active() const { return status != CaptureStatus::none; }
  bool operator==(const Capture& other) const { return id == other.id; }
  bool operator!=(const Capture& other) const { return !(*this == other); }
};

// X(name, arguments): every function is `int <prefix>name arguments`.
#define AXO_GPU_FUNCTIONS(X)                                                              \
  X(RuntimeGetVersion, (int* version))                                                    \
  X(GetDeviceCount, (int* count))                                                         \
  X(GetDevice, (int* device))                                                             \
  X(SetDevice, (int device))                                                              \
  X(DeviceSynchronize, ())                                                                \
  X(DeviceGetStreamPriorityRange, (int* least, int* greatest))                            \
  X(DeviceGetPCIBusId, (char* text, int length, int device))                              \
  X(StreamCreateWithPriority, (void** stream, unsigned flags, int))                       \
  X(StreamDestroy, (void* stream))                                                        \
  X(StreamSynchronize, (void* stream))                                                    \
  X(StreamWaitEvent, (void* stream, void* event, unsigned flags))                         \
  X(StreamIsCapturing, (void* stream, int* status))                                       \
  X(ThreadExchangeStreamCaptureMode, (int* mode))                                         \
  X(EventCreateWithFlags, (void** event, unsigned flags))                                 \
  X(EventDestroy, (void* event))                                                          \
  X(EventRecord, (void* event, void* stream))                                             \
  X(EventQuery, (void* event))                                                            \
  X(EventElapsedTime, (float* ms, void* start, void* end))                                \
  X(Malloc, (void** address, std::size_t bytes))                                          \
  X(Free, (void* address))                                                                \
  X(MallocAsync, (void** address, std::size_t bytes, void* stream))                       \
  X(FreeAsync, (void* address, void* stream))                                             \
  X(MemcpyAsync, (void* to, const void* from, std::size_t bytes, int kind, void* stream)) \
  X(MemsetAsync, (void* address, int byte, std::size_t bytes, void* stream))              \
  X(GetLastError, ())

class GpuRuntime {
 public:
  // Opens the runtime that this process uses already, else CUDA's, else HIP's. `folders` come first (tests).
  static std::shared_ptr<const GpuRuntime> open(const std::vector<std::string>& folders = {});
  // The same, of one vendor.
  static std::shared_ptr<const GpuRuntime> open(GpuVendor vendor, const std::vector<std::string>& folders = {});

  GpuVendor vendor() const { return vendor_; }
  const std::string& path() const { return library_.path(); }
  int version() const;
  std::string error_text(int status) const;
  // Throws unless `status` is success; `name` without the prefix.
  void check(int status, const char* name) const;

  int device_count() const;
  // Whether this process has a context there already; true where the runtime cannot tell.
  bool has_context(int device) const;
  // Makes `device` current on this thread, for good: for threads of Axo's own.
  void set_device(int device) const;
  std::string pci_bus_id(int device) const;
  // In hex digits; a part of a GPU (MIG, CPX) has one of its own, where its bus id is that of the whole. "" where the
  // runtime has no call for it.
  std::string device_uuid(int device) const;
  // Of the current device. High: the greatest priority that the device has, so that communication is scheduled first.
  GpuStream create_stream(bool high_priority) const;
  void destroy_stream(GpuStream stream) const noexcept;
  void synchronize(GpuStream stream) const;
  // Waits for all that the current device holds, whoever it belongs to. A broken device is done too. False where the
  // runtime refuses, since a stream captures: nothing was waited for then.
  bool synchronize_device() const noexcept;
  GpuEvent create_event(bool timing) const;
  void destroy_event(GpuEvent event) const noexcept;
  void record(GpuEvent event, GpuStream stream) const;
  void wait(GpuStream stream, GpuEvent event) const;
  bool is_complete(GpuEvent event) const;
  double seconds_between(GpuEvent start, GpuEvent end) const;
  void copy(void* to, const void* from, std::size_t bytes, GpuStream stream) const;
  void set_bytes(void* address, int byte, std::size_t bytes, GpuStream stream) const;
  // Device memory in the order of a stream; also inside a capture.
  void* allocate(std::size_t bytes, GpuStream stream) const;
  void release(void* address, GpuStream stream) const;
  void* allocate(std::size_t bytes) const;
  void release(void* address) const noexcept;

  Capture capture_info(GpuStream stream) const;
  // `fn` is called once, on a thread of the runtime's that must not call it, when the graph that `stream` records has
  // gone, with all that was made of it. False where the runtime cannot: `fn` is never called.
  bool at_end_of_graph(GpuStream stream, std::function<void()> fn) const;
  // This thread may then query events while another thread captures a graph. For helper threads only.
  void relax_capture_rules() const;

  // The stream goes on when the 4-byte word has reached `value` (cyclic compare) / writes it. Device addresses.
  // Not on AMD: HIP's compares plainly, so that a counter that wraps hangs, and it is a kernel of the runtime's that
  // spins, or, with GPU_STREAMOPS_CP_WAIT, wants memory of a special kind.
  void wait_value(GpuStream stream, const void* address, std::uint32_t value) const;
  void write_value(GpuStream stream, void* address, std::uint32_t value) const;
  bool has_stream_values() const { return wait_value_ != nullptr && write_value_ != nullptr; }

 private:
  friend class DeviceGuard;
  GpuRuntime(GpuVendor vendor, DynamicLibrary library, const std::vector<std::string>& folders);

  // The graph too, where the runtime tells it.
  int ask_capture(GpuStream stream, int* status, unsigned long long* id, void** graph) const;

  struct Table {
#define AXO_GPU_FIELD(name, arguments) int(*name) arguments = nullptr;
    AXO_GPU_FUNCTIONS(AXO_GPU_FIELD)
#undef AXO_GPU_FIELD
    const char* (*GetErrorString)(int) = nullptr;
  };

  GpuVendor vendor_;
  DynamicLibrary library_;
  DynamicLibrary driver_;  // CUDA only
  Table fn_;
  void* capture_info_ = nullptr;
  int capture_arguments_ = 0;
  void* user_object_create_ = nullptr;
  void* user_object_release_ = nullptr;
  void* graph_retain_ = nullptr;
  void* wait_value_ = nullptr;
  void* write_value_ = nullptr;
  void* get_device_ = nullptr;
  void* get_uuid_ = nullptr;
  void* get_context_state_ = nullptr;
};

// Makes `device` current on this thread for a scope. A thread that has chosen none counts as one of GPU 0, and CUDA
// would make a context there, of hundreds of megabytes, when it is given back: so it keeps `device` where there is none
// yet.
class DeviceGuard {
 public:
  DeviceGuard(const GpuRuntime& runtime, int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  const GpuRuntime& runtime_;
  int previous_ = 0;
  bool changed_ = false;
};

}  // namespace axo
