// Finding the libraries: the loaded copy first, a second copy refused, folders, names, what is missing.
// Oracle: the path of what was opened. Such a test runs in a process of its own, since a library
// once loaded stays.
#include <dlfcn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>

#include "device/dynamic_library.h"
#include "device_ranks.h"

namespace device {
namespace {

using axo::DynamicLibrary;
using axo::LibraryRequest;

// The test runs anew in a process of its own, where fn does its work.
void in_a_process(const std::function<void()>& fn) {
  if (std::getenv("AXO_FRESH")) return fn();
  std::fflush(stdout);
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::setenv("AXO_FRESH", "1", 1);
    ::execl("/proc/self/exe", "tests", family().c_str(), running(), nullptr);
    ::_exit(127);
  }
  int status = -1;
  ::waitpid(pid, &status, 0);
  CHECK_EQ(status, 0);
}

std::string copied(const std::string& from, const std::string& folder) {
  ::mkdir(folder.c_str(), 0700);
  const std::string to = folder + "/" + from.substr(from.rfind('/') + 1);
  std::ofstream(to, std::ios::binary) << std::ifstream(from, std::ios::binary).rdbuf();
  return to;
}

std::string collective_library() { return folder() + (is_hip() ? "/librccl.so.1" : "/libnccl.so.2"); }

LibraryRequest request() {
  LibraryRequest r;
  r.stem = is_hip() ? "librccl.so" : "libnccl.so";
  r.names = {is_hip() ? "librccl.so.1" : "libnccl.so.2"};
  r.override_variable = "AXO_NCCL_LIBRARY";
  return r;
}

struct Scratch {
  std::string path;
  Scratch() {
    char name[] = "/tmp/axo-libraries-XXXXXX";
    path = ::mkdtemp(name);
  }
  ~Scratch() {
    if (std::system(("rm -rf " + path).c_str()) != 0) std::perror(path.c_str());
  }
};

TEST(no_library) {
  in_a_process([] {
    LibraryRequest r;
    r.stem = "libaxonothing.so";
    r.names = {"libaxonothing.so.1"};
    r.folders = {"/nowhere"};
    CHECK_THROWS(axo::Error,
                 "cannot open libaxonothing.so: /nowhere/libaxonothing.so.1: cannot open shared object file",
                 DynamicLibrary::open(r));
    CHECK(!DynamicLibrary::find(r));
    CHECK(DynamicLibrary().symbol("ncclSend") == nullptr);
    CHECK(axo::loaded_objects("libaxonothing.so").empty());
  });
}

TEST(folders_then_the_loaded_copy) {
  Scratch scratch;
  in_a_process([&] {
    auto r = request();
    r.folders = {"/nowhere", folder()};
    const auto library = DynamicLibrary::open(r);
    CHECK(axo::same_file(library.path(), collective_library()));
    CHECK(library.symbol("ncclNothing") == nullptr);
    CHECK_THROWS(axo::Error, "has no function ncclNothing: it is too old for Axo", library.required("ncclNothing"));
    // From now on it is the loaded copy, whatever the folders hold.
    copied(collective_library(), scratch.path);
    r.folders = {scratch.path};
    CHECK(axo::same_file(DynamicLibrary::open(r).path(), collective_library()));
    CHECK_EQ(axo::loaded_objects(r.stem).size(), 1u);
  });
}

TEST(an_override_beside_a_loaded_copy) {
  Scratch scratch;
  in_a_process([&] {
    const std::string other = copied(collective_library(), scratch.path);
    auto r = request();
    r.override_path = other;
    CHECK(axo::same_file(DynamicLibrary::open(r).path(), other));  // nothing is loaded yet: the user's choice
    CHECK(axo::same_file(DynamicLibrary::open(r).path(), other));  // the same file once more
    r.override_path = collective_library();
    CHECK_THROWS(axo::Error, "AXO_NCCL_LIBRARY=" + collective_library() + " would be a second copy beside " + other,
                 DynamicLibrary::open(r));
    // Somebody loads a second copy after all.
    CHECK(::dlopen(collective_library().c_str(), RTLD_NOW | RTLD_LOCAL) != nullptr);
    CHECK_THROWS(axo::Error, "two copies of " + r.stem + " are loaded in this process: ", DynamicLibrary::find(r));
  });
}

TEST(an_override_that_does_not_open) {
  in_a_process([] {
    ::setenv("AXO_NCCL_LIBRARY", "/nowhere/libnccl.so.2", 1);
    // No silent fall-back to another copy.
    CHECK_THROWS(axo::Error, "/nowhere/libnccl.so.2: cannot open",
                 axo::NcclApi::open(is_hip() ? axo::GpuVendor::hip : axo::GpuVendor::cuda, {folder()}));
  });
}

TEST(wheels_beside_torch) {
  Scratch scratch;
  in_a_process([&] {
    // site-packages/torch/lib/libc10.so is loaded; the vendor's wheel lies in site-packages/nvidia/nccl/lib.
    for (const char* f : {"/torch", "/torch/lib", "/nvidia", "/nvidia/nccl", "/nvidia/nccl/lib"}) {
      ::mkdir((scratch.path + f).c_str(), 0700);
    }
    const std::string torch = copied(folder() + "/../libstandin.so", scratch.path + "/torch/lib");
    const std::string as_torch = scratch.path + "/torch/lib/libc10.so";
    CHECK_EQ(::rename(torch.c_str(), as_torch.c_str()), 0);
    CHECK(::dlopen(as_torch.c_str(), RTLD_NOW | RTLD_LOCAL) != nullptr);
    const std::string wheel = copied(collective_library(), scratch.path + "/nvidia/nccl/lib");
    auto r = request();
    r.wheel_folders = {"nvidia/nccl/lib"};
    CHECK(axo::same_file(DynamicLibrary::open(r).path(), wheel));
  });
}

TEST(file_names) {
  // libnccl.so.2 is the library, its plugins are not.
  CHECK(axo::same_file("/proc/self/exe", "/proc/self/exe"));
  CHECK(!axo::same_file("/nowhere/a", "/nowhere/b"));
  CHECK(axo::loaded_objects("libstan").empty());
  CHECK_EQ(axo::loaded_objects("libstandin.so").size(), 1u);
  CHECK_EQ(axo::loaded_objects("libc.so").size(), 1u);  // libc.so.6
}

TEST(the_runtime_is_found_without_a_hint) {
  in_a_process([] {
    const auto vendor = is_hip() ? axo::GpuVendor::hip : axo::GpuVendor::cuda;
    // A system may have CUDA's beside: HIP is then found because torch has loaded it, which the first line stands for.
    const auto loaded = is_hip() ? axo::GpuRuntime::open(vendor, {folder()}) : nullptr;
    const auto by_search = axo::GpuRuntime::open(std::vector<std::string>{folder()});
    CHECK(by_search->vendor() == vendor);
    CHECK_EQ(std::string(axo::name_of(vendor)), is_hip() ? "HIP" : "CUDA");
    CHECK_EQ(by_search->version(), 12090);
    CHECK_EQ(by_search->has_stream_values(), !is_old() && !is_hip());
    // Loaded by now: found without any folder, and so is the process's own context.
    CHECK(axo::GpuRuntime::open()->vendor() == vendor);
    CHECK(axo::same_file(axo::GpuRuntime::open()->path(), by_search->path()));
    axo::NcclApi::open(vendor, {folder()});
    auto context = axo::DeviceContext::of(1);
    CHECK(axo::DeviceContext::of(1) == context);
    CHECK(axo::DeviceContext::of(2) != context);
    DeviceOptions options;
    options.device = 1;
    auto comm = axo::create_device_communicator(nullptr, "alone", 0, 1, options);
    CHECK_EQ(comm->device(), 1);
    comm->shutdown();
  });
}

TEST(without_a_hint_and_nothing_loaded) {
  in_a_process([] {
    // The system may have a runtime of its own: then that one opens, else the error lists both vendors.
    try {
      CHECK(axo::GpuRuntime::open()->version() > 0);
    } catch (const axo::Error& e) {
      CHECK(std::string(e.what()).find("no GPU runtime: neither CUDA's nor HIP's could be opened") == 0);
    }
  });
}

// Nobody has loaded it before, so that no communicator can have read the variable: Axo sets it.
TEST(the_launch_order_of_a_library_that_axo_loads) {
  in_a_process([] {
    ::unsetenv("NCCL_LAUNCH_ORDER_IMPLICIT");
    standin::settings().nccl_version = 22809;
    const auto vendor = is_hip() ? axo::GpuVendor::hip : axo::GpuVendor::cuda;
    CHECK_EQ(axo::NcclApi::open(vendor, {folder()})->orders_launches(), !is_hip());
    CHECK_EQ(std::getenv("NCCL_LAUNCH_ORDER_IMPLICIT") != nullptr, !is_hip());
  });
}

// RCCL 2.22, of ROCm 6.4, may crash in a split with its MSCCL, which the user may still ask for.
TEST(msccl_of_the_rccl_that_crashes_with_it) {
  const auto vendor = is_hip() ? axo::GpuVendor::hip : axo::GpuVendor::cuda;
  for (int version : versions()) {
    for (const char* given : {"", "1"}) {
      ::unsetenv("RCCL_MSCCL_ENABLE");
      if (*given) ::setenv("RCCL_MSCCL_ENABLE", given, 1);
      standin::settings().nccl_version = version;
      axo::NcclApi::open(vendor, {folder()});
      const char* found = std::getenv("RCCL_MSCCL_ENABLE");
      const bool crashes = is_hip() && version / 100 == 222;
      CHECK_EQ(std::string(found ? found : ""), *given ? given : crashes ? "0" : "");
    }
  }
  ::unsetenv("RCCL_MSCCL_ENABLE");
}

TEST(a_library_that_cannot_tell_its_version) {
  in_a_process([] {
    standin::fail("ncclGetVersion", axo::kNcclSystemError);
    CHECK_THROWS(axo::Error, "ncclGetVersion: some error of the library (2)", new_context(0));
  });
}

TEST(runtime_calls_and_their_errors) {
  ranks(1, [](Rank& me) {
    const auto& gpu = me.context->gpu();
    const std::string prefix = is_hip() ? "hip" : "cuda";
    standin::fail(prefix + "Malloc", 12345);  // a code without a text
    CHECK_THROWS(axo::Error, prefix + "Malloc: unknown error (12345)", gpu.allocate(8));
    CHECK_EQ(gpu.pci_bus_id(3), "0000:03:00.0");
    float *device = static_cast<float*>(gpu.allocate(8)), host[2] = {1, 2}, back[2] = {};
    gpu.copy(device, host, 8, me.stream);
    gpu.copy(device, device, 8, me.stream);  // nothing to do
    gpu.copy(back, device, 8, me.stream);
    gpu.set_bytes(device, 0, 8, me.stream);
    gpu.synchronize(me.stream);
    CHECK_EQ(back[1], 2.0f);
    CHECK_EQ(device[1], 0.0f);
    gpu.release(device);
    standin::begin_capture(me.stream);
    const auto capture = gpu.capture_info(me.stream);
    CHECK(capture.active());
    CHECK(capture.id > 0);
    std::shared_ptr<standin::Graph> graph;
    standin::end_capture(me.stream, graph);
    CHECK(!gpu.capture_info(me.stream).active());
    CHECK_EQ(standin::current_device(), 0);
    {
      axo::DeviceGuard guard(gpu, 3);
      CHECK_EQ(standin::current_device(), 3);
    }
    CHECK_EQ(standin::current_device(), 0);
  });
}

}  // namespace
}  // namespace device
