// tests FAMILY [substring]: runs the tests against the stand-ins of one family, each within a deadline.
#include <dlfcn.h>
#include <errno.h>
#include <libgen.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>

#include "device_ranks.h"

namespace device {
namespace {
std::string the_family = "cuda";
const char* the_running = "";
std::atomic<long> the_threads{0};
std::atomic<bool> the_last_thread_is_made{false};

void on_alarm(int) {
  (void)!::write(2, "TIMEOUT in ", 11);
  (void)!::write(2, the_running, std::strlen(the_running));
  (void)!::write(2, "\n", 1);
  ::_exit(3);
}
}  // namespace

const std::string& family() { return the_family; }
const char* running() { return the_running; }
long threads_made() { return the_threads; }
void refuse_threads(bool refuse) { the_last_thread_is_made = refuse; }
bool refuses_threads() { return the_last_thread_is_made; }

std::vector<int> versions() {
  std::vector<int> all = {21801, 21903, 22005, 22105, 22203, 22304, 22403, 22501,
                          22602, 22703, 22803, 22809, 22907, 23004, 23102, 23203};
  const int own = is_old() ? 22105 : is_hip() ? 23102 : 23203;
  all.erase(std::find_if(all.begin(), all.end(), [&](int version) { return version > own; }), all.end());
  return all;
}

std::string folder() {
  char path[PATH_MAX] = {};
  if (::readlink("/proc/self/exe", path, sizeof path - 1) < 0) throw std::runtime_error("readlink");
  return std::string(::dirname(path)) + "/" + the_family;
}

std::shared_ptr<axo::DeviceContext> new_context(int device) {
  const auto vendor = is_hip() ? axo::GpuVendor::hip : axo::GpuVendor::cuda;
  return axo::DeviceContext::create(axo::GpuRuntime::open(vendor, {folder()}), axo::NcclApi::open(vendor, {folder()}),
                                    device);
}

void ranks(int n, const std::function<void(Rank&)>& fn) {
  auto store = std::make_shared<MapStore>();
  std::mutex mutex;
  std::string error;
  std::vector<std::thread> threads;
  for (int r = 0; r < n; ++r) {
    threads.emplace_back([&, r] {
      try {
        standin::current_device() = r;
        Rank rank{store, r, n, new_context(r), nullptr};
        rank.stream = standin::create_stream(0);
        standin::clear_calls();
        fn(rank);
        standin::destroy_stream(rank.stream);
      } catch (const std::exception& e) {
        std::lock_guard<std::mutex> lock(mutex);
        if (error.empty()) error = "rank " + std::to_string(r) + ": " + e.what();
        std::fprintf(stderr, "%s: rank %d: %s\n", the_running, r,
                     e.what());  // others may now wait for this rank for ever
      }
    });
  }
  for (auto& thread : threads) thread.join();
  if (!error.empty()) throw check::Failed(error);
  const auto broken = standin::violations();
  if (!broken.empty()) throw check::Failed("rule broken: " + text(broken));
}

std::vector<std::string> sequence() {
  std::vector<std::string> kept;
  for (const auto& call : standin::calls()) {
    bool question = false;
    for (const char* name : {"GetDevice", "SetDevice", "IsCapturing", "GetCaptureInfo", "EventQuery", "EventCreate",
                             "EventDestroy", "GetAsyncError"}) {
      question |= call.find(name) != std::string::npos;
    }
    if (!question)
      kept.push_back(call.rfind("cuda", 0) == 0 ? call.substr(4) : call.rfind("hip", 0) == 0 ? call.substr(3) : call);
  }
  return kept;
}

}  // namespace device

// The libraries hold the functions of all versions. Axo finds those of the version that a test plays.
extern "C" {
void* __real_dlsym(void* library, const char* name);
void* __wrap_dlsym(void* library, const char* name) {
  static const std::map<std::string, int> since = {{"ncclCommRegister", 21900},
                                                   {"ncclCommDeregister", 21900},
                                                   {"ncclMemAlloc", 21900},
                                                   {"ncclMemFree", 21900},
                                                   {"ncclCommWindowRegister", 22700},
                                                   {"ncclCommWindowDeregister", 22700},
                                                   {"ncclAlltoAll", 22800},
                                                   {"ncclGather", 22800},
                                                   {"ncclScatter", 22800}};
  const int version = standin::settings().nccl_version;
  const auto found = since.find(name);
  // RCCL has had these for long, one of them by an older name.
  const bool own = device::is_hip() && found != since.end() && found->second == 22800 && found->first != "ncclAlltoAll";
  if (version && found != since.end() && version < found->second && !own) return nullptr;
  return __real_dlsym(library, name);
}
}

// Stands before the C library's for the whole process: also for std::thread, and for the stand-ins.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*), void* given) {
  static const auto next = reinterpret_cast<decltype(&pthread_create)>(__real_dlsym(RTLD_NEXT, "pthread_create"));
  if (device::refuses_threads()) return EAGAIN;
  ++device::the_threads;
  return next(thread, attributes, run, given);
}

int main(int argc, char** argv) {
  if (argc > 1) device::the_family = argv[1];
  const char* filter = argc > 2 ? argv[2] : "";
  ::signal(SIGALRM, device::on_alarm);
  int failed = 0, ran = 0;
  for (const auto& test : check::tests()) {
    if (std::strstr(test.name, filter) == nullptr) continue;
    ++ran;
    device::the_running = test.name;
    ::alarm(25);
    standin::reset();
    device::refuse_threads(false);
    const long before = check::checks();
    const auto start = std::chrono::steady_clock::now();
    std::string error;
    try {
      test.run();
    } catch (const std::exception& e) {
      error = e.what();
    }
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    std::printf("%-58s %5ld checks %6.2f s  %s\n", test.name, check::checks() - before, seconds,
                error.empty() ? "ok" : ("FAILED " + error).c_str());
    std::fflush(stdout);
    failed += !error.empty();
  }
  ::alarm(0);
  std::printf("%d tests, %d failed\n", ran, failed);
  return failed || ran == 0 ? 1 : 0;
}
