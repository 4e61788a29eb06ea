#include "device/gpu_runtime.h"

#include "base/error.h"
#include "base/identity.h"

namespace axo {
namespace {

constexpr unsigned kNoDestructorSync = 1;     // the only flag that there is, and it must be given
constexpr unsigned kGraphTakesReference = 1;  // instead of one of its own

const char* prefix_of(GpuVendor vendor) { return vendor == GpuVendor::cuda ? "cuda" : "hip"; }

LibraryRequest request_for(GpuVendor vendor, const std::vector<std::string>& folders) {
  LibraryRequest request;
  if (vendor == GpuVendor::cuda) {
    request.stem = "libcudart.so";
    request.names = {"libcudart.so.13", "libcudart.so.12", "libcudart.so"};
    request.wheel_folders = {"nvidia/cu13/lib", "nvidia/cuda_runtime/lib"};
  } else {
    request.stem = "libamdhip64.so";
    request.names = {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"};
    request.wheel_folders = {"torch/lib", "_rocm_sdk_core/lib"};
  }
  request.folders = folders;
  return request;
}

}  // namespace

const char* name_of(GpuVendor vendor) { return vendor == GpuVendor::cuda ? "CUDA" : "HIP"; }

std::shared_ptr<const GpuRuntime> GpuRuntime::open(const std::vector<std::string>& folders) {
  for (GpuVendor vendor : {GpuVendor::cuda, GpuVendor::hip}) {
    if (!loaded_objects(request_for(vendor, {}).stem).empty()) return open(vendor, folders);
  }
  std::string tried;
  for (GpuVendor vendor : {GpuVendor::cuda, GpuVendor::hip}) {
    std::string why;
    auto library = DynamicLibrary::find(request_for(vendor, folders), &why);
    if (library) return std::shared_ptr<const GpuRuntime>(new GpuRuntime(vendor, library, folders));
    tried += (tried.empty() ? "" : "; ") + why;
  }
  throw Error("no GPU runtime: neither CUDA's nor HIP's could be opened (" + tried + ")");
}

std::shared_ptr<const GpuRuntime> GpuRuntime::open(GpuVendor vendor, const std::vector<std::string>& folders) {
  auto library = DynamicLibrary::open(request_for(vendor, folders));
  return std::shared_ptr<const GpuRuntime>(new GpuRuntime(vendor, library, folders));
}

GpuRuntime::GpuRuntime(GpuVendor vendor, DynamicLibrary library, const std::vector<std::string>& folders)
    : vendor_(vendor), library_(std::move(library)) {
  const std::string prefix = prefix_of(vendor);
#define AXO_GPU_LOAD(name, arguments) library_.load(&fn_.name, prefix + #name);
  AXO_GPU_FUNCTIONS(AXO_GPU_LOAD)
#undef AXO_GPU_LOAD
  library_.load(&fn_.GetErrorString, prefix + "GetErrorString");
  user_object_create_ = library_.symbol((prefix + "UserObjectCreate").c_str());
  user_object_release_ = library_.symbol((prefix + "UserObjectRelease").c_str());
  graph_retain_ = library_.symbol((prefix + "GraphRetainUserObject").c_str());

  if (vendor == GpuVendor::cuda) {
    // CUDA 12 keeps the old three-argument form under the plain name and the six-argument one as _v2; CUDA 13 has seven
    // arguments under the plain name and no _v2.
    capture_info_ = library_.symbol("cudaStreamGetCaptureInfo_v2");
    capture_arguments_ = capture_info_ ? 6 : 7;
    if (!capture_info_) capture_info_ = library_.required("cudaStreamGetCaptureInfo");
    LibraryRequest driver;
    driver.stem = "libcuda.so";
    driver.names = {"libcuda.so.1", "libcuda.so"};
    driver.folders = folders;
    driver_ = DynamicLibrary::find(driver);
    wait_value_ = driver_.symbol("cuStreamWaitValue32_v2");
    write_value_ = driver_.symbol("cuStreamWriteValue32_v2");
    get_device_ = driver_.symbol("cuDeviceGet");
    get_context_state_ = driver_.symbol("cuDevicePrimaryCtxGetState");
    get_uuid_ = driver_.symbol("cuDeviceGetUuid_v2");  // the first form gives the whole GPU's
  } else {
    capture_info_ = library_.symbol("hipStreamGetCaptureInfo_v2");
    capture_arguments_ = capture_info_ ? 6 : 3;
    if (!capture_info_) capture_info_ = library_.required("hipStreamGetCaptureInfo");
    get_device_ = library_.symbol("hipDeviceGet");
    get_uuid_ = library_.symbol("hipDeviceGetUuid");
  }
}

std::string GpuRuntime::error_text(int status) const {
  const char* text = fn_.GetErrorString(status);
  return std::string(text ? text : "unknown error") + " (" + std::to_string(status) + ")";
}

void GpuRuntime::check(int status, const char* name) const {
  if (status == kGpuSuccess) return;
  fn_.GetLastError();  // clears what is not sticky: the next unrelated call must not report it again
  throw Error(std::string(prefix_of(vendor_)) + name + ": " + error_text(status));
}

int GpuRuntime::version() const {
  int version = 0;
  check(fn_.RuntimeGetVersion(&version), "RuntimeGetVersion");
  return version;
}

int GpuRuntime::device_count() const {
  int count = 0;
  check(fn_.GetDeviceCount(&count), "GetDeviceCount");
  return count;
}

bool GpuRuntime::has_context(int device) const {
  if (!get_device_ || !get_context_state_) return true;
  using Get = int (*)(int* handle, int index);
  using GetState = int (*)(int handle, unsigned* flags, int* active);
  int handle = 0, active = 1;
  unsigned flags = 0;
  if (reinterpret_cast<Get>(get_device_)(&handle, device) != kGpuSuccess) return true;
  return reinterpret_cast<GetState>(get_context_state_)(handle, &flags, &active) != kGpuSuccess || active != 0;
}

void GpuRuntime::set_device(int device) const { check(fn_.SetDevice(device), "SetDevice"); }

std::string GpuRuntime::pci_bus_id(int device) const {
  char text[64] = {};
  check(fn_.DeviceGetPCIBusId(text, sizeof text - 1, device), "DeviceGetPCIBusId");
  return text;
}

std::string GpuRuntime::device_uuid(int device) const {
  if (!get_device_ || !get_uuid_) return "";
  using Get = int (*)(int* handle, int index);
  using GetUuid = int (*)(unsigned char* bytes, int handle);
  int handle = 0;
  unsigned char bytes[16] = {};
  check(reinterpret_cast<Get>(get_device_)(&handle, device), "DeviceGet");
  check(reinterpret_cast<GetUuid>(get_uuid_)(bytes, handle), "DeviceGetUuid");
  return hex_digits(bytes, sizeof bytes);
}

GpuStream GpuRuntime::create_stream(bool high_priority) const {
  int least = 0, greatest = 0;
  if (high_priority) check(fn_.DeviceGetStreamPriorityRange(&least, &greatest), "DeviceGetStreamPriorityRange");
  GpuStream stream = nullptr;
  check(fn_.StreamCreateWithPriority(&stream, kStreamNonBlocking, greatest), "StreamCreateWithPriority");
  return stream;
}

// The two below run in destructors, maybe after the driver has shut down: there is nobody to tell.
void GpuRuntime::destroy_stream(GpuStream stream) const noexcept {
  if (stream) fn_.StreamDestroy(stream);
}

void GpuRuntime::destroy_event(GpuEvent event) const noexcept {
  if (event) fn_.EventDestroy(event);
}

void GpuRuntime::synchronize(GpuStream stream) const { check(fn_.StreamSynchronize(stream), "StreamSynchronize"); }

bool GpuRuntime::synchronize_device() const noexcept {
  const int status = fn_.DeviceSynchronize();
  if (status != kGpuSuccess) fn_.GetLastError();
  return status < kFirstCaptureError || status > kLastCaptureError;
}

GpuEvent GpuRuntime::create_event(bool timing) const {
  GpuEvent event = nullptr;
  check(fn_.EventCreateWithFlags(&event, timing ? 0 : kEventDisableTiming), "EventCreateWithFlags");
  return event;
}

void GpuRuntime::record(GpuEvent event, GpuStream stream) const {
  check(fn_.EventRecord(event, stream), "EventRecord");
}

void GpuRuntime::wait(GpuStream stream, GpuEvent event) const {
  check(fn_.StreamWaitEvent(stream, event, 0), "StreamWaitEvent");
}

bool GpuRuntime::is_complete(GpuEvent event) const {
  const int status = fn_.EventQuery(event);
  if (status == kGpuNotReady) {
    fn_.GetLastError();
    return false;
  }
  check(status, "EventQuery");
  return true;
}

double GpuRuntime::seconds_between(GpuEvent start, GpuEvent end) const {
  float ms = 0;
  check(fn_.EventElapsedTime(&ms, start, end), "EventElapsedTime");
  return ms * 1e-3;
}

void GpuRuntime::copy(void* to, const void* from, std::size_t bytes, GpuStream stream) const {
  if (bytes == 0 || to == from) return;
  check(fn_.MemcpyAsync(to, from, bytes, kMemcpyDefault, stream), "MemcpyAsync");
}

void GpuRuntime::set_bytes(void* address, int byte, std::size_t bytes, GpuStream stream) const {
  check(fn_.MemsetAsync(address, byte, bytes, stream), "MemsetAsync");
}

void* GpuRuntime::allocate(std::size_t bytes, GpuStream stream) const {
  void* address = nullptr;
  check(fn_.MallocAsync(&address, bytes, stream), "MallocAsync");
  return address;
}

void GpuRuntime::release(void* address, GpuStream stream) const { check(fn_.FreeAsync(address, stream), "FreeAsync"); }

void* GpuRuntime::allocate(std::size_t bytes) const {
  void* address = nullptr;
  check(fn_.Malloc(&address, bytes), "Malloc");
  return address;
}

void GpuRuntime::release(void* address) const noexcept {
  if (address) fn_.Free(address);
}

Capture GpuRuntime::capture_info(GpuStream stream) const {
  int status = 0;
  // The common answer, from the cheaper call.
  check(fn_.StreamIsCapturing(stream, &status), "StreamIsCapturing");
  if (status == static_cast<int>(CaptureStatus::none)) return {};
  Capture capture;
  check(ask_capture(stream, &status, &capture.id, nullptr), "StreamGetCaptureInfo");
  capture.status = static_cast<CaptureStatus>(status);
  return capture;
}

int GpuRuntime::ask_capture(GpuStream stream, int* status, unsigned long long* id, void** graph) const {
  if (capture_arguments_ == 3) {
    using Fn = int (*)(void*, int*, unsigned long long*);
    return reinterpret_cast<Fn>(capture_info_)(stream, status, id);
  }
  if (capture_arguments_ == 6) {
    using Fn = int (*)(void*, int*, unsigned long long*, void**, const void**, std::size_t*);
    return reinterpret_cast<Fn>(capture_info_)(stream, status, id, graph, nullptr, nullptr);
  }
  using Fn = int (*)(void*, int*, unsigned long long*, void**, const void**, const void**, std::size_t*);
  return reinterpret_cast<Fn>(capture_info_)(stream, status, id, graph, nullptr, nullptr, nullptr);
}

bool GpuRuntime::at_end_of_graph(GpuStream stream, std::function<void()> fn) const {
  if (!user_object_create_ || !graph_retain_ || capture_arguments_ == 3) return false;
  int status = 0;
  unsigned long long id = 0;
  void *graph = nullptr, *object = nullptr;
  check(ask_capture(stream, &status, &id, &graph), "StreamGetCaptureInfo");
  if (!graph) return false;
  using Create = int (*)(void** object, void* data, void (*destroy)(void*), unsigned references, unsigned flags);
  using Retain = int (*)(void* graph, void* object, unsigned references, unsigned flags);
  auto data = std::make_unique<std::function<void()>>(std::move(fn));
  const auto destroy = [](void* given) {
    const std::unique_ptr<std::function<void()>> own(static_cast<std::function<void()>*>(given));
    if (*own) (*own)();
  };
  check(reinterpret_cast<Create>(user_object_create_)(&object, data.get(), destroy, 1, kNoDestructorSync),
        "UserObjectCreate");
  std::function<void()>* const given = data.release();
  const int status_of_retain = reinterpret_cast<Retain>(graph_retain_)(graph, object, 1, kGraphTakesReference);
  if (status_of_retain != kGpuSuccess) {
    *given = nullptr;  // the object goes without the call: there is no graph that could end
    using Release = int (*)(void* object, unsigned references);
    if (user_object_release_) reinterpret_cast<Release>(user_object_release_)(object, 1);
  }
  check(status_of_retain, "GraphRetainUserObject");
  return true;
}

void GpuRuntime::relax_capture_rules() const {
  int mode = kCaptureModeRelaxed;
  check(fn_.ThreadExchangeStreamCaptureMode(&mode), "ThreadExchangeStreamCaptureMode");
}

void GpuRuntime::wait_value(GpuStream stream, const void* address, std::uint32_t value) const {
  AXO_CHECK(has_stream_values(), "wait_flag: stream waits for values", "none",
            "CUDA's driver; on AMD a kernel must wait");
  using Fn = int (*)(void*, unsigned long long, std::uint32_t, unsigned);
  const auto wait = reinterpret_cast<Fn>(wait_value_);
  check(wait(stream, reinterpret_cast<std::uintptr_t>(address), value, kWaitValueGeq), "StreamWaitValue32");
}

void GpuRuntime::write_value(GpuStream stream, void* address, std::uint32_t value) const {
  AXO_CHECK(has_stream_values(), "write_flag: stream writes of values", "none",
            "CUDA's driver; on AMD a kernel must write");
  using Fn = int (*)(void*, unsigned long long, std::uint32_t, unsigned);
  const auto write = reinterpret_cast<Fn>(write_value_);
  check(write(stream, reinterpret_cast<std::uintptr_t>(address), value, 0), "StreamWriteValue32");
}

DeviceGuard::DeviceGuard(const GpuRuntime& runtime, int device) : runtime_(runtime) {
  runtime_.check(runtime_.fn_.GetDevice(&previous_), "GetDevice");
  if (previous_ == device) return;
  runtime_.check(runtime_.fn_.SetDevice(device), "SetDevice");
  changed_ = true;
}

DeviceGuard::~DeviceGuard() {
  if (changed_ && runtime_.has_context(previous_)) runtime_.fn_.SetDevice(previous_);
}

}  // namespace axo
